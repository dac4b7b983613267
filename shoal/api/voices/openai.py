"""Map OpenAI's voice names to the model's built-in voices, so that clients with a fixed list of names can use them.

A stored voice of the same name takes precedence.
"""

from collections import Counter

from shoal.voices.store import VoiceStore

# Perceived gender of each voice. Ordered by popularity: the first names get voices of their own, later ones share.
GENDERS = {
    "alloy": "",
    "nova": "female",
    "onyx": "male",
    "shimmer": "female",
    "echo": "male",
    "fable": "",
    "coral": "female",
    "ash": "male",
    "sage": "female",
    "verse": "male",
    "marin": "female",
    "cedar": "male",
    "ballad": "male",
}
OPENAI_VOICES = frozenset({*GENDERS, "default"})


def assign_openai_voices(store: VoiceStore, default: str | None) -> dict[str, str]:
    """Return the built-in voice of each OpenAI name; empty without built-in voices. Blocks on file I/O.

    `alloy`, the name most clients send by default, is the default voice. The others are distributed over the
    voices of their gender, always in the same way.
    """
    genders = {name: store.description(name).gender for name in store.names() if store.is_builtin(name)}
    if not genders:
        return {}
    first = default if default in genders else min(genders)
    assigned = {"default": first, "alloy": first}
    used = Counter([first])
    for name, gender in GENDERS.items():
        if name not in assigned:
            fitting = [voice for voice in genders if gender in ("", genders[voice])] or list(genders)
            assigned[name] = min(fitting, key=lambda voice: (used[voice], voice))
            used[assigned[name]] += 1
    return assigned
