"""API keys: made here, shown once, kept as hashes.

A key is `shoal_` and 32 random bytes, so one round of SHA-256 is enough: there is nothing to guess. The file holds one
entry per key with its own limits, is written whole or not at all, by one at a time, and is read anew when it changes.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.api.config import KeyLimits
from shoal.errors import InvalidRequest
from shoal.paths import atomic_write, file_lock, output_errors

PREFIX = "shoal_"
SHORTEST = 16  # characters of a key that somebody chose by hand


@dataclass(frozen=True)
class Key:
    """Who calls. `name` is for people, logs and metrics; the key itself is not here."""

    name: str
    sha256: str = field(repr=False)
    created: str = ""
    limits: KeyLimits = field(default=KeyLimits())


ANYONE = Key("anyone", "")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def chosen_key(number: int, key: str, limits: KeyLimits) -> Key:
    """A key from the settings. Raises InvalidRequest for one that could be guessed."""
    if len(key) < SHORTEST:
        raise InvalidRequest(f"API key {number} has {len(key)} characters; a key needs at least {SHORTEST}")
    return Key(f"settings-{number}", digest(key), limits=limits)


class KeyRing:
    """All keys that open the door; without any it stands open."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def owner(self, key: str) -> Key | None:
        """Takes the same time for every wrong key: all are compared, each in constant time."""
        found, shown = None, digest(key)
        for each in self._keys:
            if hmac.compare_digest(each.sha256, shown):
                found = each
        return found


class KeyFile:
    """The keys of a JSON file. One that is not there holds none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Key]:
        """Raises InvalidRequest naming the file when it is not one of ours."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return [_key(entry) for entry in stored["keys"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise InvalidRequest(f"{self.path}: this is not a file of keys: {problem}") from None

    def stamp(self) -> tuple[int, int] | None:
        """Changes when the file does."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def new(self, name: str, limits: KeyLimits | None = None) -> str:
        """Adds a key and returns it; it cannot be shown again. Raises InvalidRequest for a name that is taken."""
        if not name.strip():
            raise InvalidRequest("a key needs a name")
        secret = PREFIX + secrets.token_urlsafe(32)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._locked():
            keys = self.read()
            if any(key.name == name for key in keys):
                raise InvalidRequest(f"there is a key named {name!r} already")
            self._write([*keys, Key(name, digest(secret), now, limits or KeyLimits())])
        return secret

    def revoke(self, name: str) -> None:
        """A running server refuses it within seconds. Raises InvalidRequest for a name that is not there."""
        with self._locked():
            keys = self.read()
            left = [key for key in keys if key.name != name]
            if len(left) == len(keys):
                raise InvalidRequest(f"there is no key named {name!r} in {self.path}")
            self._write(left)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers, in all processes, from reading the keys to writing them back. Raises OutputError."""
        # The lock is on a file beside the keys: an atomic write replaces the file itself.
        lock = self.path.with_name(f".{self.path.name}.lock")
        with ExitStack() as stack:
            with output_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(file_lock(lock, private=True))
            yield

    def _write(self, keys: list[Key]) -> None:
        content = json.dumps({"keys": [_entry(key) for key in keys]}, indent=2) + "\n"
        atomic_write(self.path, content.encode(), private=True)


def _entry(key: Key) -> dict[str, Any]:
    return {"name": key.name, "sha256": key.sha256, "created": key.created, **asdict(key.limits)}


def _key(entry: dict[str, Any]) -> Key:
    rest = dict(entry)
    key = Key(rest.pop("name"), rest.pop("sha256"), rest.pop("created"))
    if not isinstance(key.name, str) or not isinstance(key.sha256, str) or len(key.sha256) != 64:
        raise ValueError("a key has a name and the SHA-256 of its text")
    return replace(key, limits=KeyLimits(**rest))
