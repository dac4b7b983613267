"""Devices that refuse, on command."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from torch import Tensor

from shoal.engine.core import EngineCore
from shoal.engine.scheduler import Batch, Drawn

Poisonous = Callable[[Batch], bool]


@contextmanager
def poisoned(core: EngineCore, poisonous: Poisonous, *, after: bool = False) -> Iterator[list[Batch]]:
    """Batches for which `poisonous` holds fail, before or `after` the device has written; yields those that did."""
    run, failed = core.runner.run, list[Batch]()

    def run_or_fail(batch: Batch) -> Drawn:
        if not poisonous(batch):
            return run(batch)
        failed.append(batch)
        if after:
            run(batch)
        raise RuntimeError("the device refused")

    core.runner.run = run_or_fail  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        core.runner.run = run  # type: ignore[method-assign]


def holds(*ids: int) -> Poisonous:
    """Whatever has one of these in it."""
    return lambda batch: any(sequence.id in ids for sequence in batch.sequences())


class FlakyDecoder:
    """A streaming decoder some of whose calls fail, half of them after they have written."""

    def __init__(self, core: EngineCore, chance: Callable[[], bool], dice: Random) -> None:
        self._real, self._chance, self._dice = core.voicebox._decoder, chance, dice
        self.past = self._real.past
        self.failed = 0

    @property
    def _seen(self) -> list[int]:
        return self._real._seen

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        fails = self._chance()
        if fails and self._dice.random() < 0.5:
            self._fail()
        samples = self._real.decode(codes, slots, lengths)
        if fails:
            self._fail()
        return samples

    def reset(self, slots: Sequence[int]) -> None:
        self._real.reset(slots)

    def _fail(self) -> None:
        self.failed += 1
        raise RuntimeError("the codec broke")
