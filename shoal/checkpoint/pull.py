"""Download models from the Hugging Face hub into its cache or into a directory.

`huggingface_hub` does the transfer: a dropped connection is resumed at the same byte, and a repeated pull fetches only
the missing files. This module selects the files, asks the hub once with a short timeout, and explains failures.
"""

import errno
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import cast

from shoal.checkpoint.find import BUNDLED, SHORT_NAMES, HubSource, cached_snapshot
from shoal.checkpoint.format.layout import CODEC_FILES, MODEL_FILES, missing_files
from shoal.checkpoint.format.profile import PROFILE_FILE
from shoal.errors import CheckpointError, InvalidRequest, ModelNotFound, OutputError
from shoal.paths import atomic_write, output_errors

# The licence of the weights is fetched too: it differs from that of this package.
SMALL_FILES = (
    "config.json", "codec.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken", "special_tokens.json",
    PROFILE_FILE, "LICENSE*",
)  # fmt: skip
SHARDS = "model-*.safetensors"
VOICES = re.compile(r"voices/[^/]+/[^/]+")
TIMEOUT_SECONDS = 8.0
DISK_ERRORS = {errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


@dataclass(frozen=True, slots=True)
class PullResult:
    """Location of a pulled model. `checked` is False if the hub was unreachable and the cached copy may be outdated."""

    directory: Path
    bytes: int
    checked: bool


@dataclass(frozen=True, slots=True)
class Hub:
    """Endpoint and cache; None selects the defaults of `huggingface_hub` (HF_ENDPOINT, HF_HOME)."""

    endpoint: str | None = None
    cache: Path | None = None
    progress: bool = True


class _Unreachable(Exception):
    """The hub could not be reached; the message says why."""


def pull(name: str, *, to: Path | None = None, hub: Hub | None = None) -> PullResult:
    """Download s1-mini, s2-pro or OWNER/NAME, optionally with @REVISION, into the cache or the new directory `to`.

    Raises InvalidRequest for an invalid name, ModelNotFound if the hub is unreachable or denies access,
    CheckpointError if the repository is not a model, OutputError if a file cannot be written.
    """
    if name == BUNDLED:
        raise InvalidRequest(f"{BUNDLED} is part of this package: there is nothing to download")
    source = HubSource.parse(name)
    if source is None:
        raise InvalidRequest(f"{name!r} is not a model on the hub: expected {', '.join(SHORT_NAMES)} or OWNER/NAME")
    if to is not None and to.exists():
        raise OutputError(f"{to} already exists: choose another name")
    hub = hub or Hub()
    try:
        sizes = _list_files(source, hub)
    except _Unreachable as problem:
        return _cached_copy(name, source, to, hub, problem)
    files = {file: sizes[file] for file in choose_files(source, sizes)}
    try:
        directory = _fetch_to(to, source, files, hub) if to else _fetch(source, files, hub)
    except _Unreachable as problem:
        raise ModelNotFound(
            f"the download of {name} was interrupted: {problem}; complete files are kept, "
            f"run `shoal pull {name}` again to fetch the others"
        ) from problem
    return PullResult(directory, sum(size or 0 for size in files.values()), checked=True)


def choose_files(source: HubSource, names: Iterable[str]) -> list[str]:
    """Return the files that inference needs; of several formats of the weights, only one. Raises CheckpointError."""
    present = set(names)
    chosen = {name for name in present if any(fnmatch(name, pattern) for pattern in SMALL_FILES) and "/" not in name}
    weights = next((name for name in MODEL_FILES if name in present), None)
    codec = next((name for name in CODEC_FILES if name in present), None)
    if weights is None or "config.json" not in present:
        missing = "config.json" if weights else " or ".join(MODEL_FILES)
        raise CheckpointError(f"{source.repository} is not a supported model: it has no {missing}")
    chosen |= {name for name in (weights, codec) if name is not None}
    if weights.endswith(".index.json"):
        chosen |= {name for name in present if fnmatch(name, SHARDS) and "/" not in name}
    if PROFILE_FILE in present:
        # The profile may name a default voice.
        chosen |= {name for name in present if VOICES.fullmatch(name)}
    return sorted(chosen)


def _list_files(source: HubSource, hub: Hub) -> dict[str, int | None]:
    """Return names and sizes of the repository's files. Not retried, because a user is waiting."""
    from huggingface_hub import HfApi

    with _translate_errors(source, hub):
        found = HfApi(endpoint=hub.endpoint).model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=TIMEOUT_SECONDS
        )
    return {file.rfilename: file.size for file in found.siblings or ()}


def _fetch(source: HubSource, files: dict[str, int | None], hub: Hub, folder: Path | None = None) -> Path:
    from huggingface_hub import snapshot_download

    with _translate_errors(source, hub), _progress(hub.progress):
        directory = snapshot_download(
            source.repository,
            revision=source.revision,
            allow_patterns=list(files),
            cache_dir=hub.cache,
            local_dir=folder,
            endpoint=hub.endpoint,
        )
    _require_complete(Path(directory), source, files)
    _replace_links(Path(directory) / file for file in files if VOICES.fullmatch(file))
    return Path(directory)


def _replace_links(files: Iterable[Path]) -> None:
    """Replace links to blobs of the cache by copies: voice files must not be links."""
    for file in files:
        if not file.is_symlink():
            continue
        with output_errors(file):
            atomic_write(file, file.read_bytes())


def _fetch_to(to: Path, source: HubSource, files: dict[str, int | None], hub: Hub) -> Path:
    """Download into a folder beside the target and rename it at the end; an interrupted download resumes from it."""
    partial = _fetch(source, files, hub, _partial_folder(to, source))
    try:
        _remove_others(partial, files)
        return partial.replace(to)
    except OSError as problem:
        raise OutputError(f"cannot write {to}: {problem.strerror}") from problem


def _partial_folder(to: Path, source: HubSource) -> Path:
    """Return a folder name that depends on the source, so that a pull of another model does not resume from it."""
    digest = blake2b(f"{source.repository}@{source.revision}".encode(), digest_size=4).hexdigest()
    return to.with_name(f".{to.name}.{digest}.part")


def _remove_others(folder: Path, files: Iterable[str]) -> None:
    """Remove the metadata of `huggingface_hub`, and files of an interrupted pull that the repository no longer has."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    kept = set(files)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def _cached_copy(name: str, source: HubSource, to: Path | None, hub: Hub, problem: _Unreachable) -> PullResult:
    directory = cached_snapshot(source, hub.cache)
    if to is None and directory is not None and not missing_files(directory, codec=source.released):
        return PullResult(
            directory, sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()), checked=False
        )
    raise ModelNotFound(
        f"{problem}; fix that and run `shoal pull {name}` again, or copy the model's directory from another machine "
        "and give its path as --model"
    ) from problem


def _require_complete(directory: Path, source: HubSource, sizes: dict[str, int | None]) -> None:
    missing = missing_files(directory, codec=source.released)
    missing += [file for file, size in sizes.items() if not _is_complete(directory / file, size)]
    if missing:
        raise CheckpointError(f"{source.repository} is incomplete in {directory}: {', '.join(missing)} missing")


def _is_complete(file: Path, size: int | None) -> bool:
    return file.is_file() and size in (None, file.stat().st_size)


@contextmanager
def _translate_errors(source: HubSource, hub: Hub) -> Iterator[None]:
    """Translate exceptions of `huggingface_hub` into errors that say what to do."""
    from huggingface_hub import constants, errors

    # The base class of its HTTP errors belongs to the HTTP client, which differs between versions.
    client_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    place = hub.endpoint or constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as problem:
        raise ModelNotFound(
            f"{source.repository} is gated: accept its licence at {place}/{source.repository}, "
            "then provide a token with `hf auth login` or HF_TOKEN"
        ) from problem
    except errors.RevisionNotFoundError as problem:
        raise ModelNotFound(f"{source.repository} has no revision {source.revision}") from problem
    except errors.RepositoryNotFoundError as problem:
        raise ModelNotFound(
            f"{place} has no model {source.repository}, or it is private: "
            "provide a token with `hf auth login` or HF_TOKEN"
        ) from problem
    except errors.OfflineModeIsEnabled as problem:
        raise _Unreachable("HF_HUB_OFFLINE is set, so nothing can be downloaded") from problem
    except (client_error, errors.EntryNotFoundError, errors.FileMetadataError) as problem:
        raise _Unreachable(f"{place} cannot be reached: {_first_line(problem)}") from problem
    except OSError as problem:
        if problem.errno in DISK_ERRORS:
            raise OutputError(f"cannot write {problem.filename or 'the model'}: {problem.strerror}") from problem
        raise _Unreachable(f"{place} cannot be reached: {_first_line(problem)}") from problem


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    from huggingface_hub import utils as bars

    silenced = not shown and not bars.are_progress_bars_disabled()  # type: ignore[attr-defined]
    if silenced:
        bars.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if silenced:
            bars.enable_progress_bars()  # type: ignore[attr-defined]


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
