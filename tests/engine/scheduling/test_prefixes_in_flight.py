import numpy as np

from shoal.engine.scheduling.prefixes_in_flight import PrefixesInFlight
from shoal.engine.scheduling.sequence import Sequence
from shoal.speech import SamplingParams

SIZE = 4


def sequence(id: int = 0, tokens: int = 12) -> Sequence:
    """Return a sequence whose blocks are allocated and not computed."""
    prompt = np.arange(2 * tokens, dtype=np.int32).reshape(tokens, 2)
    made = Sequence.start(id, prompt, SamplingParams(), 40)
    made.extend_keys(SIZE)
    made.blocks = [10 * id + index for index in range(tokens // SIZE + 1)]
    return made


def test_a_block_in_flight_is_found_by_its_key() -> None:
    prefixes, first = PrefixesInFlight(), sequence(1)
    prefixes.begin_plan()
    prefixes.add(first, 0, 10, SIZE)
    assert [prefixes.borrow(key, sequence(2)) for key in first.keys] == [10, 11, None]


def test_the_tokens_of_a_block_may_be_computed_by_several_plans() -> None:
    prefixes, first = PrefixesInFlight(), sequence(1)
    for start, end in ((0, 3), (3, 6), (6, 9)):
        prefixes.begin_plan()
        prefixes.add(first, start, end, SIZE)
    assert [prefixes.borrow(key, sequence(2)) for key in first.keys] == [10, 11, None]


def test_blocks_of_a_sequence_that_was_preempted_are_not_found() -> None:
    prefixes, first = PrefixesInFlight(), sequence(1)
    prefixes.begin_plan()
    prefixes.add(first, 0, 12, SIZE)
    first.reset_kv()
    assert prefixes.borrow(first.keys[0], sequence(2)) is None


def test_blocks_that_are_in_the_prefix_cache_are_dropped_by_the_next_plan() -> None:
    prefixes, first = PrefixesInFlight(), sequence(1)
    prefixes.begin_plan()
    prefixes.add(first, 0, 12, SIZE)
    first.sealed = 1
    prefixes.begin_plan()
    assert [prefixes.borrow(key, sequence(2)) for key in first.keys[:2]] == [None, 11]


def test_a_preempted_sequence_orphans_those_that_borrowed_in_the_same_plan_only() -> None:
    prefixes, first, second, third = PrefixesInFlight(), sequence(1), sequence(2), sequence(3)
    prefixes.begin_plan()
    prefixes.add(first, 0, 9, SIZE)
    prefixes.borrow(first.keys[0], second)
    assert not prefixes.invalid_borrowers()
    first.reset_kv()
    assert prefixes.invalid_borrowers() == [second]
    second.reset_kv()
    assert not prefixes.invalid_borrowers()

    leader = sequence(4)
    prefixes.begin_plan()
    prefixes.add(leader, 0, 9, SIZE)
    prefixes.begin_plan()
    prefixes.borrow(leader.keys[0], third)
    leader.reset_kv()  # its step is in flight: what it computes will be there
    assert not prefixes.invalid_borrowers()
