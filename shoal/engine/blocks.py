"""Pages of KV memory: who holds which, what the full ones contain, and which may be taken back.

A block is free, held by one or more sequences, or cached: full, held by nobody, and kept in case a prompt with the
same beginning comes. A full block is known by the hash of everything up to its end, all codebooks included, so equal
keys mean equal keys-and-values. A block that is still being filled has no key and exactly one holder.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Key = bytes
ROOT: Key = b""


@dataclass(slots=True)
class BlockStats:
    hits: int = 0  # prompts that found at least one block of theirs
    tokens_saved: int = 0  # tokens that did not have to be computed
    evictions: int = 0
    host_hits: int = 0  # blocks brought back from host memory


def block_key(before: Key, tokens: NDArray[np.int32]) -> Key:
    """The key of a full block: its tokens [size, 1 + codebooks] and, through `before`, all tokens in front of it."""
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()


class BlockStore(Protocol):
    """Where blocks are kept that had to make room."""

    def __contains__(self, key: Key) -> bool: ...

    def save(self, block: int, key: Key) -> None:
        """Keep what is in a block; it may be overwritten afterwards."""

    def restore(self, key: Key, block: int) -> bool:
        """Bring back what is kept under `key`; False if nothing is."""


class BlockPool:
    """Hands out blocks by number; the memory behind them belongs to the runner."""

    def __init__(self, count: int, size: int, *, caching: bool = True) -> None:
        self.size = size
        self.count = count
        self.stats = BlockStats()
        self._caching = caching
        self._free: deque[int] = deque(range(count))
        self._holders = [0] * count
        self._key: list[Key | None] = [None] * count
        self._by_key: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reused = [False] * count  # whether a second prompt has asked for it
        self.host_cache: BlockStore | None = None

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def needed(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.size)

    def take(self) -> int:
        """A block of one's own, empty. The caller has checked `available`."""
        block = self._free.popleft() if self._free else self._evict()
        self._holders[block] = 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one hold on each. Deepest first: the beginning of a prompt is what others can share."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._retire(block)

    def seal(self, block: int, key: Key) -> None:
        """The block is full and its content is known by `key`; from now on it can be shared and is never written."""
        if self._caching and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def in_use(self, keys: Iterable[Key]) -> int:
        """How many blocks of the beginning of `keys` somebody holds: to share these takes nothing from `available`."""
        count = 0
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            count += self._holders[block] > 0
        return count

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Hold the blocks of the longest known beginning of `keys` and return them."""
        found: list[int] = []
        for key in keys:
            block = self._find(key)
            if block is None:
                break
            found.append(block)
        if found:
            self.stats.hits += 1
            self.stats.tokens_saved += len(found) * self.size
        return found

    def clear_cache(self) -> None:
        """Forget everything that nobody holds, for good: nothing of it is put anywhere."""
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._free.append(block)

    def _find(self, key: Key) -> int | None:
        block = self._by_key.get(key)
        if block is None:
            return self._fetch(key)
        self._holders[block] += 1
        self._reused[block] = True
        self._cached.pop(block, None)
        return block

    def _fetch(self, key: Key) -> int | None:
        """Bring a block back from the tier below, if it is there and there is room."""
        if self.host_cache is None or key not in self.host_cache or not self.available:
            return None
        block = self.take()
        if not self.host_cache.restore(key, block):  # the one that made room for it may have taken its place
            self.release([block])
            return None
        self.stats.host_hits += 1
        self.seal(block, key)
        self._reused[block] = True
        return block

    def _retire(self, block: int) -> None:
        if self._key[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> int:
        """Empty the block that was used least recently.

        It is kept below only if it has been of use: most are the ends of speeches, of which nobody will ask again, and
        they would drive out the voices.
        """
        block, _ = self._cached.popitem(last=False)
        worth_keeping = self._reused[block]
        key = self._forget(block)
        if worth_keeping and self.host_cache is not None:
            self.host_cache.save(block, key)
        self.stats.evictions += 1
        return block

    def _forget(self, block: int) -> Key:
        key, self._key[block], self._reused[block] = self._key[block], None, False
        assert key is not None, "a cached block has a key"
        del self._by_key[key]
        return key
