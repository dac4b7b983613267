"""Shoal: production inference for the Fish-Speech voices.

    import shoal

    with shoal.load("nano") as engine:
        speech = engine.speak("Hello there.")

What is listed in `__all__` is promised; everything else may move.
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

_HOMES = {
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
    """Import a promised name when it is first used: `import shoal` and `shoal --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
