"""A model's name -> its directory. The network is never asked: what is not here is not found. Nothing needs torch.

random:SIZE          weights drawn on the spot; they have no directory
nano                 the model inside this package
a directory          wherever it is
s1-mini, s2-pro      what `shoal pull` put into the Hugging Face cache, by short name
OWNER/NAME           the same, by repository; any of them with @REVISION
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.layout import is_directory, is_file, missing_files
from shoal.errors import ModelNotFound

RANDOM_PREFIX = "random:"
BUNDLED = "nano"
BUNDLED_DIRECTORY = Path(__file__).parents[1] / "models" / BUNDLED
SHORT_NAMES = {"s1-mini": "fishaudio/openaudio-s1-mini", "s2-pro": "fishaudio/s2-pro"}
# A revision becomes part of a path in the cache, so it must not climb out of it.
REVISION = re.compile(r"[A-Za-z0-9](?:[\w-]|[./](?=[\w-]))*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub at a revision."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, name: str) -> "HubSource | None":
        """None when the name cannot be one of the hub's."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        known, at, revision = name.partition("@")
        repository = SHORT_NAMES.get(known, known)
        try:
            validate_repo_id(repository)
        except HFValidationError:
            return None
        if repository.count("/") != 1 or (at and not REVISION.fullmatch(revision)):
            return None
        return cls(repository, revision or "main")

    @property
    def released(self) -> bool:
        """Whether it is one of Fish's own, which bring their codec along; quantised ones borrow it."""
        return self.repository in SHORT_NAMES.values()


def find_directory(name: str, *, cache: Path | None = None) -> Path:
    """The directory that holds the model of that name; `cache` is another Hugging Face cache folder than the usual."""
    if name == BUNDLED:
        return _bundled()
    directory = Path(os.path.expanduser(name))  # noqa: PTH111 - Path raises for a user that there is not
    if name and is_directory(directory):
        return directory
    if is_file(directory):
        raise ModelNotFound(f"{name} is a file; give the directory that holds it and its config.json")
    source = HubSource.parse(name)
    if source is None:
        raise ModelNotFound(f"{name}: no such directory, and no known name. {_what_to_type()}")
    return _cached(name, source, cache)


def cached_snapshot(source: HubSource, cache: Path | None = None) -> Path | None:
    """The folder of the Hugging Face cache with this repository in it, complete or not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repository, "config.json", cache_dir=cache, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def _bundled() -> Path:
    if not missing_files(BUNDLED_DIRECTORY, codec=True):
        return BUNDLED_DIRECTORY
    raise ModelNotFound(
        f"{BUNDLED} is not part of this build. Use `--model random:tiny` to try the pipeline, "
        "or fetch a Fish model: `shoal pull s1-mini`, then `--model s1-mini`"
    )


def _cached(name: str, source: HubSource, cache: Path | None) -> Path:
    directory = cached_snapshot(source, cache)
    if directory is None:
        raise ModelNotFound(f"{name} is not on this machine. Type: shoal pull {name}")
    lacking = missing_files(directory, codec=source.released)
    if lacking:
        raise ModelNotFound(
            f"the download of {name} is not complete, it lacks {', '.join(lacking)}. "
            f"To go on where it stopped, type: shoal pull {name}"
        )
    return directory


def _what_to_type() -> str:
    return (
        f"A model is a directory, {BUNDLED}, {', '.join(SHORT_NAMES)} or a repository OWNER/NAME "
        f"(after `shoal pull s1-mini`), or random weights ({RANDOM_PREFIX}tiny)"
    )
