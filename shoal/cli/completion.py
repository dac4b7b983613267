"""Shell completion of models and voices. Runs on every TAB, so it lists directories and reads no files."""

from pathlib import Path

import typer

from shoal.checkpoint.find import BUNDLED, BUNDLED_DIRECTORY, RANDOM_PREFIX, find_directory
from shoal.errors import ModelNotFound

MODELS = ("nano", "s1-mini", "s2-pro", "random:tiny", "random:tiny-s2", "random:s1-mini", "random:s2-pro")


def complete_model(incomplete: str) -> list[str]:
    return [name for name in (*MODELS, *_directories(incomplete)) if name.startswith(incomplete)]


def complete_voice(context: typer.Context, incomplete: str) -> list[str]:
    """Return the matching voices, stored and built into the model; recordings are files, which the shell completes."""
    from shoal.voices.store import voice_directory

    names = {*_names(voice_directory()), *builtin_voices(context.params.get("model") or BUNDLED)}
    return sorted(name for name in names if name.startswith(incomplete))


def complete_stored_voice(incomplete: str) -> list[str]:
    """Return the matching voices that can be renamed and removed."""
    from shoal.voices.store import voice_directory

    return [name for name in _names(voice_directory()) if name.startswith(incomplete)]


def builtin_voices(model: str) -> list[str]:
    """Return the names of the voices that come with a model; none if it is not installed."""
    if model == BUNDLED:
        return _names(BUNDLED_DIRECTORY / "voices")
    try:
        return [] if model.startswith(RANDOM_PREFIX) else _names(find_directory(model) / "voices")
    except ModelNotFound:
        return []


def _names(directory: Path) -> list[str]:
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path.name for path in found if path.is_dir() and not path.name.startswith("."))


def _directories(incomplete: str) -> list[str]:
    """Return the directories with a config.json below the typed path."""
    typed = Path(incomplete)
    parent = typed if incomplete.endswith("/") else typed.parent
    if not incomplete.startswith((".", "/")) or not parent.is_dir():
        return []
    prefix = incomplete if incomplete.endswith("/") else incomplete[: incomplete.rfind("/") + 1]
    return sorted(f"{prefix}{path.name}" for path in parent.iterdir() if (path / "config.json").is_file())
