"""Model name -> directory, without network access and without torch.

random:SIZE          random weights; they have no directory
nano                 the model bundled with this package
a directory          any path
s1-mini, s2-pro      pulled into the Hugging Face cache by `shoal pull`, by short name
OWNER/NAME           pulled, by repository; both may be followed by @REVISION
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.format.layout import is_directory, is_file, missing_files
from shoal.errors import ModelNotFound

RANDOM_PREFIX = "random:"
BUNDLED = "nano"
BUNDLED_DIRECTORY = Path(__file__).parents[1] / "models" / BUNDLED
SHORT_NAMES = {"s1-mini": "fishaudio/openaudio-s1-mini", "s2-pro": "fishaudio/s2-pro"}
# A revision becomes part of a path in the cache and must not leave it.
REVISION = re.compile(r"[A-Za-z0-9](?:[\w-]|[./](?=[\w-]))*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSource:
    """Repository of the Hugging Face hub at a revision."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, name: str) -> "HubSource | None":
        """Parse a short name or OWNER/NAME, with an optional @REVISION; None if the name cannot be on the hub."""
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
        """Return whether this is a release of Fish Audio, which includes a codec; quantized repositories may not."""
        return self.repository in SHORT_NAMES.values()


def find_directory(name: str, *, cache: Path | None = None) -> Path:
    """Return the directory of a model; `cache` overrides the Hugging Face cache. Raises ModelNotFound."""
    if name == BUNDLED:
        return _bundled()
    directory = Path(os.path.expanduser(name))  # noqa: PTH111 - Path raises for an unknown user
    if name and is_directory(directory):
        return directory
    if is_file(directory):
        raise ModelNotFound(f"{name} is a file: give the directory that contains it and config.json")
    source = HubSource.parse(name)
    if source is None:
        raise ModelNotFound(f"{name}: no such directory and not a known name; {_accepted_names()}")
    return _cached(name, source, cache)


def cached_snapshot(source: HubSource, cache: Path | None = None) -> Path | None:
    """Return the snapshot of a repository in the Hugging Face cache, complete or not; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repository, "config.json", cache_dir=cache, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def _bundled() -> Path:
    if not missing_files(BUNDLED_DIRECTORY, codec=True):
        return BUNDLED_DIRECTORY
    raise ModelNotFound(
        f"{BUNDLED} is not part of this build: use --model random:tiny to try the pipeline, "
        "or run `shoal pull s1-mini` and use --model s1-mini"
    )


def _cached(name: str, source: HubSource, cache: Path | None) -> Path:
    directory = cached_snapshot(source, cache)
    if directory is None:
        raise ModelNotFound(f"{name} is not in the cache: run `shoal pull {name}`")
    missing = missing_files(directory, codec=source.released)
    if missing:
        raise ModelNotFound(
            f"the download of {name} is incomplete, {', '.join(missing)} missing: run `shoal pull {name}` to resume it"
        )
    return directory


def _accepted_names() -> str:
    return (
        f"a model is a directory, {BUNDLED}, {', '.join(SHORT_NAMES)} or a repository OWNER/NAME "
        f"(after `shoal pull s1-mini`), or random weights ({RANDOM_PREFIX}tiny)"
    )
