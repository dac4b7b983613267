"""Devices that refuse, on command."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from torch import Tensor

from shoal.engine.core import EngineCore
from shoal.engine.execution.runner import PendingStep
from shoal.engine.scheduler import Batch, StepOutput

Poisonous = Callable[[Batch], bool]


class Lost:
    """A flight that never comes down."""

    def __init__(self, flight: PendingStep) -> None:
        self.batch = flight.batch

    def wait(self) -> StepOutput:
        raise RuntimeError("the device failed")


@contextmanager
def poisoned(core: EngineCore, poisonous: Poisonous, *, after: bool = False) -> Iterator[list[Batch]]:
    """Batches for which `poisonous` holds fail when they are launched; yields those that did.

    With `after` they fail when they land: the device has written, and the step before has landed and counts.
    """
    launcher, failed = core.runner.runner.launcher, list[Batch]()
    launch = launcher.launch

    def launch_or_fail(batch: Batch) -> PendingStep | Lost:
        if not poisonous(batch):
            return launch(batch)
        failed.append(batch)
        if after:
            return Lost(launch(batch))
        raise RuntimeError("the device refused")

    launcher.launch = launch_or_fail  # type: ignore[method-assign, assignment]
    try:
        yield failed
    finally:
        launcher.launch = launch  # type: ignore[method-assign]


def holds(*ids: int) -> Poisonous:
    """Whatever has one of these in it."""
    return lambda batch: any(sequence.id in ids for sequence in batch.sequences())


class FlakyDecoder:
    """A streaming decoder some of whose calls fail, half of them after they have written."""

    def __init__(self, core: EngineCore, chance: Callable[[], bool], dice: Random) -> None:
        self._real, self._chance, self._dice = core.audio_decoder._decoder, chance, dice
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
