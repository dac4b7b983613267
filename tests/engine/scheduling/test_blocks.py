from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.kv_cache import HostCache, PagedKV
from shoal.engine.scheduling.blocks import ROOT, BlockPool, Key, block_key
from shoal.model.config import BlockConfig

SMALL = BlockConfig(
    n_layer=2,
    dim=8,
    n_head=2,
    n_local_heads=1,
    head_dim=4,
    intermediate_size=8,
    rope_base=1e4,
    norm_eps=1e-6,
    attention_qk_norm=False,
    max_seq_len=64,
)


def keys(count: int, first: int = 0) -> list[Key]:
    return [b"key %d" % number for number in range(first, first + count)]


def sealed(pool: BlockPool, names: list[Key]) -> list[int]:
    """Return allocated full blocks, registered under these keys."""
    blocks = [pool.take() for _ in names]
    for block, key in zip(blocks, names, strict=True):
        pool.seal(block, key)
    return blocks


def test_every_block_is_allocated_once() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.take() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert (pool.available, pool.used, pool.cached) == (0, 5, 0)


def test_a_released_block_that_was_never_full_is_free_again() -> None:
    pool = BlockPool(1, 4)
    pool.release([pool.take()])
    assert (pool.available, pool.used, pool.cached) == (1, 0, 0)


def test_a_released_full_block_stays_in_the_cache() -> None:
    pool = BlockPool(3, 4)
    blocks = sealed(pool, keys(2))
    pool.release(blocks)
    assert (pool.available, pool.used, pool.cached) == (3, 0, 2)
    assert pool.match(keys(3)) == blocks
    assert (pool.available, pool.used, pool.cached) == (1, 2, 0)


def test_a_shared_block_is_released_by_the_last_of_its_holders() -> None:
    pool = BlockPool(2, 4)
    blocks = sealed(pool, keys(1))
    assert pool.match(keys(1)) == blocks
    pool.release(blocks)
    assert pool.used == 1
    pool.release(blocks)
    assert pool.used == 0


def test_matching_stops_at_the_first_missing_block() -> None:
    pool = BlockPool(4, 4)
    first, _, third = sealed(pool, [b"a", b"unknown", b"c"])
    assert pool.match([b"a", b"b", b"c"]) == [first]
    assert third not in pool.match([b"b", b"c"])


def test_referenced_blocks_of_the_known_prefix_are_counted() -> None:
    pool = BlockPool(5, 4)
    blocks = sealed(pool, keys(3))
    pool.release(blocks[2:])
    assert pool.in_use(keys(3)) == 2
    assert pool.in_use([b"other", *keys(3)]) == 0
    assert pool.stats.hits == 0


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    blocks = {name: sealed(pool, [name])[0] for name in (b"a", b"b", b"c")}
    pool.release(blocks.values())
    pool.release(pool.match([b"c"]))
    pool.release(pool.match([b"a"]))
    taken = [pool.take(), pool.take(), pool.take()]
    assert taken == [blocks[b"b"], blocks[b"c"], blocks[b"a"]]
    assert pool.stats.evictions == 3
    assert pool.match([b"a"]) == []


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, 4)
    pool.release(sealed(pool, keys(3)))
    pool.take()
    assert len(pool.match(keys(3))) == 2


def test_equal_blocks_are_registered_once() -> None:
    pool = BlockPool(3, 4)
    first, second = sealed(pool, [b"a"]), sealed(pool, [b"a"])
    assert pool.match([b"a"]) == first
    pool.release(second)
    assert pool.cached == 0  # no key, so it cannot be matched


def test_without_caching_no_block_is_cached_or_matched() -> None:
    pool = BlockPool(2, 4, caching=False)
    pool.release(sealed(pool, keys(2)))
    assert (pool.cached, pool.match(keys(2)), pool.stats.hits) == (0, [], 0)


def test_hits_and_saved_tokens_are_counted() -> None:
    pool = BlockPool(4, 4)
    pool.release(sealed(pool, keys(3)))
    pool.match(keys(2))
    pool.match([b"nothing of the dtype"])
    assert (pool.stats.hits, pool.stats.tokens_saved) == (1, 8)
    assert (pool.stats.lookups, pool.stats.hit_ratio) == (2, 0.5)


def test_clearing_the_cache_drops_unreferenced_blocks_without_saving_them(kv: PagedKV) -> None:
    pool, tier = BlockPool(4, 4), HostCache(kv, 1 << 20)
    pool.host_cache = tier
    held = sealed(pool, keys(1))
    pool.release(sealed(pool, keys(2, first=1)))
    pool.release(pool.match(keys(3)))
    assert pool.clear_cache() == 2
    assert (pool.cached, pool.used, pool.available, len(tier)) == (0, 1, 3, 0)
    assert pool.match(keys(3)) == held


def test_a_key_depends_on_every_codebook_and_all_tokens_before() -> None:
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    other = tokens.copy()
    other[1, 3] += 1  # only the last codebook of the last token
    assert block_key(ROOT, tokens) == block_key(ROOT, tokens.copy())
    assert block_key(ROOT, tokens) != block_key(ROOT, other)
    assert block_key(ROOT, tokens) != block_key(block_key(ROOT, other), tokens)


@pytest.fixture
def kv() -> PagedKV:
    memory = PagedKV(SMALL, 3, 4, torch.float32, "cpu")
    memory.keys.normal_()
    memory.values.normal_()
    return memory


def test_an_evicted_block_is_restored_from_the_host_cache_bit_identical(kv: PagedKV) -> None:
    pool, tier = BlockPool(3, 4), HostCache(kv, 1 << 20)
    pool.host_cache = tier
    blocks = sealed(pool, keys(2))
    before = kv.keys[:, blocks].clone(), kv.values[:, blocks].clone()
    pool.release(blocks)
    pool.release(pool.match(keys(2)))
    strangers = [pool.take() for _ in range(3)]
    kv.keys.fill_(7.0), kv.values.fill_(7.0)
    assert (pool.match(keys(2)), len(tier)) == ([], 2)
    pool.release(strangers)
    back = pool.match(keys(2))
    assert len(back) == pool.stats.host_hits == 2
    assert torch.equal(kv.keys[:, back], before[0])
    assert torch.equal(kv.values[:, back], before[1])


def test_restored_blocks_can_be_shared(kv: PagedKV) -> None:
    pool, tier = BlockPool(3, 4), HostCache(kv, 1 << 20)
    pool.host_cache = tier
    pool.release(sealed(pool, keys(1)))
    pool.release(pool.match(keys(1)))
    pool.release([pool.take() for _ in range(3)])
    assert pool.match(keys(1)) == pool.match(keys(1))
    assert pool.stats.host_hits == 1


def test_only_reused_blocks_go_to_the_host_cache(kv: PagedKV) -> None:
    pool, tier = BlockPool(3, 4), HostCache(kv, 1 << 20)
    pool.host_cache = tier
    pool.release(sealed(pool, keys(3)))
    pool.release(pool.match(keys(1)))
    for _ in range(2):  # a restored block counts as reused
        pool.release([pool.take() for _ in range(3)])
        assert (len(tier), len(pool.match(keys(3)))) == (1, 1)
        pool.release([0])


def test_no_block_is_evicted_for_an_unknown_key(kv: PagedKV) -> None:
    pool = BlockPool(3, 4)
    pool.host_cache = HostCache(kv, 1 << 20)
    pool.release(sealed(pool, keys(3)))
    assert (pool.match([b"nothing of the dtype"]), pool.stats.evictions) == ([], 0)


def test_restoring_a_block_may_evict_the_entry_to_restore(kv: PagedKV) -> None:
    pool, tier = BlockPool(1, 4), HostCache(kv, PagedKV.bytes_per_block(SMALL, 4, torch.float32))
    pool.host_cache = tier
    for name in (b"a", b"b"):
        pool.release(sealed(pool, [name]))
        pool.release(pool.match([name]))
    assert (b"a" in tier, pool.match([b"a"]), pool.match([b"b"])) == (True, [], [0])


def test_the_host_cache_keeps_the_most_recently_used_blocks(kv: PagedKV) -> None:
    tier = HostCache(kv, 2 * PagedKV.bytes_per_block(SMALL, 4, torch.float32))
    for block, name in enumerate((b"a", b"b")):
        tier.save(block, name)
    assert tier.restore(b"a", 2)
    tier.save(2, b"c")
    assert (len(tier), tier.restore(b"b", 0), tier.restore(b"a", 0)) == (2, False, True)


def test_without_pinned_memory_the_host_cache_is_disabled(
    kv: PagedKV, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("cannot pin")))
    tier = HostCache(kv, 1 << 20)
    tier.save(0, b"key")
    assert b"key" not in tier
    assert "cannot pin" in caplog.text


def test_a_host_cache_of_size_0_copies_nothing(kv: PagedKV) -> None:
    tier = HostCache(kv, 0)
    tier.save(0, b"a")
    assert (len(tier), tier.restore(b"a", 0)) == (0, False)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=60))
def test_every_block_is_free_used_or_cached(orders: list[tuple[int, int]]) -> None:
    """Four prompts; each command starts or ends one of a given length."""
    pool, held = BlockPool(8, 4), dict[int, list[int]]()
    for prompt, length in orders:
        if prompt in held:
            pool.release(held.pop(prompt))
        else:
            names = [b"%d %d" % (prompt % 2, place) for place in range(length)]
            blocks = pool.match(names)
            fresh = min(pool.available, length - len(blocks))
            blocks += [pool.take() for _ in range(fresh)]
            for block, name in zip(blocks, names, strict=False):
                pool.seal(block, name)
            held[prompt] = blocks
        assert pool.used == len({block for blocks in held.values() for block in blocks})
        assert pool.available + pool.used == pool.count
