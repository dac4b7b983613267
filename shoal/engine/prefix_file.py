"""KV blocks of a built-in voice on disk: a new process reads them instead of computing that part of the prompt again.

Only blocks before the text are stored. Their content depends on the tokens, which the keys of the blocks hash, and on
the model and the code that computed it, which `identity` names.
"""

import logging
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from shoal.engine.scheduling.blocks import BlockPool, Key
from shoal.errors import OutputError
from shoal.paths import atomic_write

logger = logging.getLogger(__name__)

MAX_FILES = 16  # the oldest are deleted; a file of nano takes about 4 MB
Blocks = NDArray[np.float32]  # [layers, blocks, size, kv_heads, d]


class PrefixFile:
    """`BlockStore` of one prompt prefix, backed by a file. `memory` holds the keys and values of the block pool."""

    def __init__(self, folder: Path, identity: str, keys: list[Key], memory: tuple[Blocks, Blocks]) -> None:
        """Read the file if there is one. `keys` are those of the prefix's full blocks, at least one."""
        self._keys, self._memory = keys, memory
        self._path = folder / f"{blake2b(identity.encode() + keys[-1], digest_size=16).hexdigest()}.safetensors"
        self._blocks = self._read()
        self._index = {key: index for index, key in enumerate(keys)} if self._blocks else {}

    def __contains__(self, key: Key) -> bool:
        return key in self._index

    def save(self, block: int, key: Key) -> None:
        """Do nothing: evicted blocks are not stored."""

    def restore(self, key: Key, block: int) -> bool:
        if key not in self._index:
            return False
        for part, stored in zip(self._memory, self._blocks, strict=True):
            part[:, block] = stored[:, self._index[key]]
        return True

    def store(self, pool: BlockPool) -> None:
        """Write the blocks of the prefix from the pool to the file, unless it was read. Errors are only logged."""
        if self._blocks:
            return
        blocks = pool.match(self._keys)
        try:
            if len(blocks) == len(self._keys):
                self._write([np.ascontiguousarray(part[:, blocks]) for part in self._memory])
        except (OSError, OutputError) as error:
            logger.info("the keys and values of the voice are not stored: %s", error)
        finally:
            pool.release(blocks)

    def _read(self) -> tuple[Blocks, ...]:
        try:
            stored = load_file(self._path)
            blocks = (stored["keys"], stored["values"])
        except (OSError, SafetensorError, KeyError):  # not written yet, or damaged: computed and written again
            return ()
        expected = (self._memory[0].shape[0], len(self._keys), *self._memory[0].shape[2:])
        return blocks if all(each.shape == expected and each.dtype == np.float32 for each in blocks) else ()

    def _write(self, blocks: list[Blocks]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(self._path, save(dict(zip(("keys", "values"), blocks, strict=True))), private=True)
        files = sorted(self._path.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            with suppress(FileNotFoundError):  # another process deletes as well
                old.unlink()
