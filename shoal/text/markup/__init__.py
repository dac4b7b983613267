"""Markup in texts: pauses, SSML and escapes. Markup becomes segments; what is spoken of them is decided later."""
