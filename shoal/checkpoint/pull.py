"""Models from the Hugging Face hub into its cache, or into a directory of one's own: whole, or not at all.

The hub's own library does the work. A line that drops is taken up at the same byte; after a pull that gave up, the
next one goes on with the files that are still missing. We choose the files, ask once, with little patience, whether
the hub answers, and say what to do when it does not.
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

from shoal.checkpoint.find import SHORT_NAMES, HubSource, cached_snapshot
from shoal.checkpoint.layout import CODEC_FILES, MODEL_FILES, missing_files
from shoal.checkpoint.profile import PROFILE_FILE
from shoal.errors import CheckpointError, InvalidRequest, ModelNotFound, OutputError
from shoal.paths import atomic_write, output_errors

# The licence comes along because these weights have one of their own.
SMALL_FILES = (
    "config.json", "codec.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.tiktoken", "special_tokens.json",
    PROFILE_FILE, "LICENSE*",
)  # fmt: skip
SHARDS = "model-*.safetensors"
VOICES = re.compile(r"voices/[^/]+/[^/]+")
PATIENCE_SECONDS = 8.0
DISK_TROUBLE = {errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


@dataclass(frozen=True, slots=True)
class PullResult:
    """Where a model lies now. `checked` is False when the hub could not be asked whether there is a newer one."""

    directory: Path
    bytes: int
    checked: bool


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to ask, where to keep; None is the library's own choice (HF_ENDPOINT, HF_HOME)."""

    endpoint: str | None = None
    cache: Path | None = None
    progress: bool = True


class _Unreachable(Exception):
    """The hub gave no answer; the message says why."""


def pull(name: str, *, to: Path | None = None, hub: Hub | None = None) -> PullResult:
    """Fetch s1-mini, s2-pro or OWNER/NAME, each with @REVISION if need be.

    Raises InvalidRequest for an impossible name, ModelNotFound when the hub does not answer or will not give it,
    CheckpointError when the repository holds no model, OutputError when the disk refuses.
    """
    source = HubSource.parse(name)
    if source is None:
        raise InvalidRequest(f"{name!r} is no model of the hub; give {', '.join(SHORT_NAMES)} or OWNER/NAME")
    if to is not None and to.exists():
        raise OutputError(f"{to} exists already; choose another name")
    hub = hub or Hub()
    try:
        sizes = _ask(source, hub)
    except _Unreachable as problem:
        return _already_here(name, source, to, hub, problem)
    files = {file: sizes[file] for file in choose_files(source, sizes)}
    try:
        directory = _fetch_to(to, source, files, hub) if to else _fetch(source, files, hub)
    except _Unreachable as problem:
        raise ModelNotFound(
            f"the download of {name} broke off: {problem}. The files that have arrived are kept; "
            f"for the others, type again: shoal pull {name}"
        ) from problem
    return PullResult(directory, sum(size or 0 for size in files.values()), checked=True)


def choose_files(source: HubSource, names: Iterable[str]) -> list[str]:
    """What of a repository is needed to speak: one form of the weights, not all of them."""
    present = set(names)
    chosen = {name for name in present if any(fnmatch(name, pattern) for pattern in SMALL_FILES) and "/" not in name}
    weights = next((name for name in MODEL_FILES if name in present), None)
    codec = next((name for name in CODEC_FILES if name in present), None)
    if weights is None or "config.json" not in present:
        lacking = "config.json" if weights else " or ".join(MODEL_FILES)
        raise CheckpointError(f"{source.repository} holds no model that can be read here: it has no {lacking}")
    chosen |= {name for name in (weights, codec) if name is not None}
    if weights.endswith(".index.json"):
        chosen |= {name for name in present if fnmatch(name, SHARDS) and "/" not in name}
    if PROFILE_FILE in present:
        # A profile may name the voice of requests that choose none.
        chosen |= {name for name in present if VOICES.fullmatch(name)}
    return sorted(chosen)


def _ask(source: HubSource, hub: Hub) -> dict[str, int | None]:
    """Names and sizes of the repository's files. One request, no second try: a person is waiting."""
    from huggingface_hub import HfApi

    with _answers(source, hub):
        found = HfApi(endpoint=hub.endpoint).model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=PATIENCE_SECONDS
        )
    return {file.rfilename: file.size for file in found.siblings or ()}


def _fetch(source: HubSource, files: dict[str, int | None], hub: Hub, folder: Path | None = None) -> Path:
    from huggingface_hub import snapshot_download

    with _answers(source, hub), _progress(hub.progress):
        directory = snapshot_download(
            source.repository,
            revision=source.revision,
            allow_patterns=list(files),
            cache_dir=hub.cache,
            local_dir=folder,
            endpoint=hub.endpoint,
        )
    _require_whole(Path(directory), source, files)
    _make_plain(Path(directory) / file for file in files if VOICES.fullmatch(file))
    return Path(directory)


def _make_plain(files: Iterable[Path]) -> None:
    """The cache holds links to its blobs, and voices are read through no link."""
    for file in files:
        if not file.is_symlink():
            continue
        with output_errors(file):
            atomic_write(file, file.read_bytes())


def _fetch_to(to: Path, source: HubSource, files: dict[str, int | None], hub: Hub) -> Path:
    """Into a folder beside the target that takes its name at the end, and is there to go on from until then."""
    part = _fetch(source, files, hub, _part(to, source))
    try:
        _keep_only(part, files)
        return part.replace(to)
    except OSError as problem:
        raise OutputError(f"cannot write {to}: {problem.strerror}") from problem


def _part(to: Path, source: HubSource) -> Path:
    """Named by what it is a part of, too: another model must not go on from these files."""
    digest = blake2b(f"{source.repository}@{source.revision}".encode(), digest_size=4).hexdigest()
    return to.with_name(f".{to.name}.{digest}.part")


def _keep_only(folder: Path, files: Iterable[str]) -> None:
    """Remove the library's own notes, and what the repository had when an earlier pull broke off and has no more."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    kept = set(files)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def _already_here(name: str, source: HubSource, to: Path | None, hub: Hub, problem: _Unreachable) -> PullResult:
    directory = cached_snapshot(source, hub.cache)
    if to is None and directory is not None and not missing_files(directory, codec=source.released):
        return PullResult(
            directory, sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()), checked=False
        )
    raise ModelNotFound(
        f"{problem}. When that is put right, type again: shoal pull {name}; or copy the model's directory "
        "from a machine that has it, and give its path as --model"
    ) from problem


def _require_whole(directory: Path, source: HubSource, sizes: dict[str, int | None]) -> None:
    lacking = missing_files(directory, codec=source.released)
    lacking += [file for file, size in sizes.items() if not _arrived(directory / file, size)]
    if lacking:
        raise CheckpointError(f"{source.repository} is not complete in {directory}, it lacks {', '.join(lacking)}")


def _arrived(file: Path, size: int | None) -> bool:
    return file.is_file() and size in (None, file.stat().st_size)


@contextmanager
def _answers(source: HubSource, hub: Hub) -> Iterator[None]:
    """Turn what the hub's library raises into what to do about it."""
    from huggingface_hub import constants, errors

    # The base of all its HTTP errors belongs to the client underneath, which has changed with its versions.
    client_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    place = hub.endpoint or constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as problem:
        raise ModelNotFound(
            f"{source.repository} is gated. Accept its licence at {place}/{source.repository}, then give your token: "
            "`hf auth login`, or HF_TOKEN in the environment"
        ) from problem
    except errors.RevisionNotFoundError as problem:
        raise ModelNotFound(f"{source.repository} has no revision {source.revision}") from problem
    except errors.RepositoryNotFoundError as problem:
        raise ModelNotFound(
            f"{place} has no model {source.repository}, or shows it only to those who have a token for it "
            "(`hf auth login`, or HF_TOKEN in the environment)"
        ) from problem
    except errors.OfflineModeIsEnabled as problem:
        raise _Unreachable("HF_HUB_OFFLINE is set in the environment, so nothing can be fetched") from problem
    except (client_error, errors.EntryNotFoundError, errors.FileMetadataError) as problem:
        raise _Unreachable(f"{place} cannot be reached: {_first_line(problem)}") from problem
    except OSError as problem:
        if problem.errno in DISK_TROUBLE:
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
