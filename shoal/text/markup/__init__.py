"""Markup in texts: pauses, SSML and escapes. Markup is parsed into segments; `plan.py` decides how they are spoken."""
