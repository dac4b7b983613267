import pytest
import torch

from shoal.checkpoint.random import TINY_CODEC
from shoal.codec.dac import Codec
from shoal.codec.streaming import StreamingDecoder
from shoal.engine.memory.allocation_tracker import AllocationTracker
from shoal.engine.memory.capacity import CONTEXTS, capacity_table, card_capacity, max_sequences


def test_live_tensors_are_counted_and_freed_ones_are_not() -> None:
    with torch.device("meta"), AllocationTracker() as peak:
        first = torch.zeros(1000, dtype=torch.uint8)
        view = first[10:]  # shares the memory of `first`
        second = view + 1
        del first, view
        third = torch.zeros(500, dtype=torch.uint8)
    assert peak.peak_bytes == 1000 + 990
    assert len(second) + len(third) == 1490


def test_meta_tensors_give_the_memory_of_real_ones() -> None:
    """One codec call, on the meta device and with weights."""
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device), torch.inference_mode():
            decoder = StreamingDecoder(Codec(TINY_CODEC, encoder=False), 2)
            codes = torch.zeros(2, 10, 4, dtype=torch.long)
            decoder.decode(codes, [0, 1])
            with AllocationTracker() as peak:
                decoder.decode(codes, [0, 1])
        found.append(peak.peak_bytes)
    assert found[0] == found[1] > 0


def test_max_sequences_fills_the_memory_and_no_more() -> None:
    roomy = max_sequences(10**9, TINY_CODEC, kv_bytes=10**6)
    assert 100 < roomy < 1000
    assert max_sequences(10**9, TINY_CODEC, kv_bytes=10**8) < roomy
    assert max_sequences(0, TINY_CODEC, kv_bytes=1) == 0


def test_an_8_bit_kv_cache_holds_nearly_twice_the_sequences() -> None:
    for holding in capacity_table((24, 80)):
        assert holding.voices[4096]["8-bit"] >= 1.9 * holding.voices[4096]["16-bit"]


@pytest.mark.parametrize(("card", "measured"), [(8, 12), (12, 42)])
def test_the_computed_capacity_is_near_the_measured_one(card: int, measured: int) -> None:
    """S1-mini with 16 slots on an H200 whose other memory was taken (`scripts/card_memory.py`)."""
    assert abs(card_capacity(card, "s1-mini").voices[CONTEXTS[0]]["16-bit"] - measured) <= 2


def test_the_targets_for_small_cards_are_met() -> None:
    """Four sequences of s2-pro in 8 and 12 GB."""
    assert card_capacity(8, "s2-pro").voices[CONTEXTS[0]]["16-bit"] >= 4
    assert card_capacity(12, "s2-pro").voices[CONTEXTS[0]]["16-bit"] >= 4
    assert card_capacity(8, "s2-pro").weights == "slow=int4,fast=int8,codec=int8"
    assert card_capacity(24, "s2-pro").weights == "none"
