"""Shell completion of models and voices. Runs on every TAB, so it lists directories and reads no files."""

from pathlib import Path

MODELS = ("nano", "s1-mini", "s2-pro", "random:tiny", "random:tiny-s2", "random:s1-mini", "random:s2-pro")


def complete_model(incomplete: str) -> list[str]:
    return [name for name in (*MODELS, *_directories(incomplete)) if name.startswith(incomplete)]


def complete_voice(incomplete: str) -> list[str]:
    """Return the stored voices that match; recordings are files, which the shell completes itself."""
    from shoal.voices.store import voice_directory

    directory = voice_directory()
    names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    return [name for name in names if name.startswith(incomplete) and not name.startswith(".")]


def _directories(incomplete: str) -> list[str]:
    """Return the directories with a config.json below the typed path."""
    typed = Path(incomplete)
    parent = typed if incomplete.endswith("/") else typed.parent
    if not incomplete.startswith((".", "/")) or not parent.is_dir():
        return []
    prefix = incomplete if incomplete.endswith("/") else incomplete[: incomplete.rfind("/") + 1]
    return sorted(f"{prefix}{path.name}" for path in parent.iterdir() if (path / "config.json").is_file())
