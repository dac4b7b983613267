import gc
import weakref

import pytest

from shoal.gc_pause import paused_gc, resume_full_gc, skip_existing_objects


def test_nothing_is_collected_inside_and_what_was_created_is_skipped_afterwards() -> None:
    before = gc.get_freeze_count()
    with paused_gc():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    resume_full_gc()
    assert gc.get_freeze_count() == 0


def test_an_error_resumes_collection() -> None:
    with pytest.raises(ZeroDivisionError), paused_gc():
        raise ZeroDivisionError
    assert gc.isenabled()
    resume_full_gc()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_existing_objects_are_skipped_and_later_ones_are_collected() -> None:
    kept: list[list[int]] = [[] for _ in range(1000)]
    skip_existing_objects()
    assert gc.get_freeze_count() >= len(kept)
    assert not any(each is kept for each in gc.get_objects())
    cycle = Cycle()
    gone = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert gone() is None
    resume_full_gc()


class Cycle:
    def __init__(self) -> None:
        self.itself = self
