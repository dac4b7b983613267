"""API keys: generated here, shown once, stored as hashes.

A key is `shoal_` and 32 random bytes; with that much entropy one round of SHA-256 is enough. The key file holds one
entry per key with its own limits. It is replaced atomically, under a lock, and a running server reloads it when it
changes.
"""

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.api.config import KeyLimits
from shoal.errors import InvalidRequest, counted
from shoal.paths import atomic_write, file_lock, output_errors
from shoal.speech import Pronunciation
from shoal.text.lexicon import read_lexicon

PREFIX = "shoal_"
MAX_WORDS = 1_000  # limit of a key's lexicon, which travels with each of its requests
MIN_LENGTH = 16  # characters of a key chosen by hand
REQUIRED = ("name", "sha256", "created")  # fields of an entry of the key file, besides its limits and `lexicon`
LIMITS = tuple(each.name for each in fields(KeyLimits))


@dataclass(frozen=True)
class Key:
    """An API key without its secret. `name` appears in logs and metrics."""

    name: str
    sha256: str = field(repr=False)
    created: str = ""
    limits: KeyLimits = field(default=KeyLimits())
    lexicon_file: str | None = None
    lexicon: tuple[Pronunciation, ...] = field(default=(), repr=False)  # read from `lexicon_file` by the server

    def load_lexicon(self) -> "Key":
        """Return the key with the words of its lexicon. Raises InvalidRequest for a file that cannot be read."""
        if self.lexicon_file is None:
            return self
        entries = tuple(read_lexicon(Path(self.lexicon_file)).entries.values())
        if len(entries) > MAX_WORDS:
            raise InvalidRequest(
                f"{self.lexicon_file} has {counted(len(entries), 'word')}; a key may have at most {MAX_WORDS}"
            )
        return replace(self, lexicon=entries)


ANONYMOUS = Key("anyone", "")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_from_settings(number: int, key: str, limits: KeyLimits) -> Key:
    """Return the key of a secret from the settings. Raises InvalidRequest for one that is too short."""
    if len(key) < MIN_LENGTH:
        raise InvalidRequest(f"API key {number} has {len(key)} characters; a key needs at least {MIN_LENGTH}")
    return Key(f"settings-{number}", digest(key), limits=limits)


class KeyRing:
    """The keys that the server accepts."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str) -> Key | None:
        """Compare against all keys in constant time, so that timing reveals nothing about stored keys."""
        found, sha256 = None, digest(key)
        for each in self._keys:
            if hmac.compare_digest(each.sha256, sha256):
                found = each
        return found


class KeyFile:
    """A JSON file of keys. A missing file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Key]:
        """Return the stored keys, none without a file. Raises InvalidRequest, naming the file, if it is invalid."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(stored, dict) or not isinstance(stored.get("keys"), list):
                raise ValueError("it needs an object with a list under `keys`")
            return [_key(entry) for entry in stored["keys"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as problem:
            raise InvalidRequest(f"{self.path} is not a key file: {problem}") from None

    def version(self) -> tuple[int, int] | None:
        """Return a value that changes whenever the file does."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    def create(self, name: str, limits: KeyLimits | None = None, lexicon: Path | None = None) -> str:
        """Add a key and return its secret, which is not stored. Raises InvalidRequest when the name is taken."""
        if not name.strip():
            raise InvalidRequest("a key needs a name")
        secret = PREFIX + secrets.token_urlsafe(32)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        created = Key(
            name, digest(secret), now, limits or KeyLimits(), None if lexicon is None else str(lexicon.resolve())
        )
        created.load_lexicon()  # a file that cannot be read is reported now, not when the server starts
        with self._locked():
            keys = self.read()
            if any(key.name == name for key in keys):
                raise InvalidRequest(f"there is a key named {name!r} already")
            self._write([*keys, created])
        return secret

    def revoke(self, name: str) -> None:
        """Remove a key; a running server rejects it within seconds. Raises InvalidRequest for an unknown name."""
        with self._locked():
            keys = self.read()
            remaining = [key for key in keys if key.name != name]
            if len(remaining) == len(keys):
                raise InvalidRequest(f"there is no key named {name!r} in {self.path}")
            self._write(remaining)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out writers in all processes while keys are read, changed and written back. Raises OutputError."""
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
    lexicon = {} if key.lexicon_file is None else {"lexicon": key.lexicon_file}
    return {"name": key.name, "sha256": key.sha256, "created": key.created, **asdict(key.limits), **lexicon}


def _key(entry: Any) -> Key:
    """Return the key of an entry. Raises ValueError for one that is missing, unknown or has another type."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in REQUIRED):
        raise ValueError(f"every key needs the texts {', '.join(REQUIRED)}")
    if unknown := [name for name in entry if name not in (*REQUIRED, *LIMITS, "lexicon")]:
        raise ValueError(f"the key {entry['name']!r} has an unknown field {unknown[0]!r}")
    if len(entry["sha256"]) != 64:
        raise ValueError(f"sha256 of the key {entry['name']!r} must have 64 characters")
    if not isinstance(entry.get("lexicon"), str | None):
        raise ValueError(f"lexicon of the key {entry['name']!r} must be a text")
    limits = {name: _limit(entry, name) for name in LIMITS if name in entry}
    return Key(entry["name"], entry["sha256"], entry["created"], KeyLimits(**limits), entry.get("lexicon"))


def _limit(entry: dict[str, Any], name: str) -> Any:
    value = entry[name]
    if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
        raise ValueError(
            f"{name} of the key {entry['name']!r} must be null or a number of at least 0, not {value!r:.40}"
        )
    return value
