"""KV block pool: reference counts, prefix cache keyed by content hash, LRU eviction.

A block is free, held by one or more sequences, or cached: full and unreferenced, kept for prompts with the same prefix.
The key of a full block is a hash of all tokens up to its end, all codebooks included, so blocks with equal hashes have
equal KV content. A partially filled block has no key and exactly one holder.
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
    lookups: int = 0  # prompts that were looked up
    hits: int = 0  # prompts that reused at least one block
    tokens_saved: int = 0  # tokens that were not recomputed
    evictions: int = 0
    host_hits: int = 0  # blocks restored from host memory

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0


def block_key(before: Key, tokens: NDArray[np.int32]) -> Key:
    """Return the key of a full block: the hash of its tokens [size, 1 + codebooks] and of the previous key."""
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()


def extend_keys(keys: list[Key], tokens: NDArray[np.int32], size: int) -> None:
    """Append the keys of the full blocks of `tokens` [T, 1 + codebooks] that have none yet."""
    for start in range(len(keys) * size, len(tokens) - size + 1, size):
        keys.append(block_key(keys[-1] if keys else ROOT, tokens[start : start + size]))


class BlockStore(Protocol):
    """Second-level storage for evicted blocks."""

    def __contains__(self, key: Key) -> bool: ...

    def save(self, block: int, key: Key) -> None:
        """Copy the content of a block, which may be overwritten afterwards."""

    def restore(self, key: Key, block: int) -> bool:
        """Copy the content stored under `key` into a block; False if there is none."""


class BlockPool:
    """Allocates blocks by index; the memory belongs to PagedKV."""

    def __init__(self, count: int, size: int, *, caching: bool = True) -> None:
        self.size = size
        self.count = count
        self.stats = BlockStats()
        self._caching = caching
        self._free: deque[int] = deque(range(count))
        self._holders = [0] * count  # reference counts
        self._key: list[Key | None] = [None] * count
        self._by_key: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reused = [False] * count  # whether a second prompt has used the block
        self.host_cache: BlockStore | None = None

    @property
    def caching(self) -> bool:
        """Return whether blocks are shared between sequences."""
        return self._caching

    @property
    def available(self) -> int:
        """Blocks that `take` can allocate now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.count - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def needed(self, tokens: int) -> int:
        """Return the number of blocks for this many tokens."""
        return -(-tokens // self.size)

    def take(self) -> int:
        """Allocate an empty block, evicting a cached one if needed. The caller has checked `available`."""
        block = self._free.popleft() if self._free else self._evict()
        self._holders[block] = 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, last block first, so that prompt prefixes are evicted last."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._retire(block)

    def seal(self, block: int, key: Key) -> None:
        """Register a full block under its key; from now on it is shared and read-only."""
        if self._caching and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def in_use(self, keys: Iterable[Key]) -> int:
        """Return how many blocks of the cached prefix of `keys` are referenced; sharing them needs no free block."""
        count = 0
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            count += self._holders[block] > 0
        return count

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Reference and return the blocks of the longest cached prefix of `keys`."""
        found: list[int] = []
        self.stats.lookups += 1
        for key in keys:
            block = self._find(key)
            if block is None:
                break
            found.append(block)
        self.record_saved(len(found) * self.size, new_hit=True)
        return found

    def record_saved(self, tokens: int, *, new_hit: bool) -> None:
        """Count tokens of a prompt that need not be computed; `new_hit` unless the prompt was counted before."""
        self.stats.tokens_saved += tokens
        self.stats.hits += new_hit and tokens > 0

    def share(self, key: Key) -> int | None:
        """Reference and return the cached block of a key; None if there is none. The host cache is not searched."""
        block = self._by_key.get(key)
        if block is not None:
            self.reference(block)
        return block

    def reference(self, block: int) -> None:
        """Add a reference to a block that has one, or is cached."""
        self._holders[block] += 1
        self._reused[block] = True
        self._cached.pop(block, None)

    def clear_cache(self) -> int:
        """Drop all unreferenced blocks without saving them to the host cache; return their number."""
        count = len(self._cached)
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        return count

    def _find(self, key: Key) -> int | None:
        block = self.share(key)
        return self._fetch(key) if block is None else block

    def _fetch(self, key: Key) -> int | None:
        """Restore a block from the host cache, if it is there and a block is available."""
        if self.host_cache is None or key not in self.host_cache or not self.available:
            return None
        block = self.take()
        if not self.host_cache.restore(key, block):  # evicting a block for it may have replaced it in the host cache
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
        """Evict the least recently used cached block and return it.

        Only blocks that were reused go to the host cache: most blocks are ends of utterances that never match again
        and would displace the voices.
        """
        block, _ = self._cached.popitem(last=False)
        reused = self._reused[block]
        key = self._forget(block)
        if reused and self.host_cache is not None:
            self.host_cache.save(block, key)
        self.stats.evictions += 1
        return block

    def _forget(self, block: int) -> Key:
        key, self._key[block], self._reused[block] = self._key[block], None, False
        assert key is not None, "a cached block has a key"
        del self._by_key[key]
        return key
