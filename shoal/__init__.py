"""Shoal: production inference engine for the Fish-Speech text-to-speech models.

    import shoal

    with shoal.load("nano") as engine:
        speech = engine.speak("Hello there.")

The names in `__all__` are the public API; everything else may change.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AudioChunk",
    "Engine",
    "FinishReason",
    "Sampling",
    "ShoalError",
    "Speech",
    "SpeechRequest",
    "Voice",
    "__version__",
    "load",
]

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.engine.load import load
    from shoal.errors import ShoalError
    from shoal.speech import AudioChunk, FinishReason, Sampling, Speech, SpeechRequest
    from shoal.voices.voice import Voice

_MODULES = {
    "AudioChunk": "shoal.speech",
    "Engine": "shoal.engine.engine",
    "FinishReason": "shoal.speech",
    "Sampling": "shoal.speech",
    "ShoalError": "shoal.errors",
    "Speech": "shoal.speech",
    "SpeechRequest": "shoal.speech",
    "Voice": "shoal.voices.voice",
    "load": "shoal.engine.load",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `import shoal` and `shoal --help` must not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names before their first use, for completion in notebooks and shells."""
    return sorted({*globals(), *_MODULES})
