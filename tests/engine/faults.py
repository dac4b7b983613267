"""Fault injection for runners and codecs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from torch import Tensor

from shoal.engine.core import EngineCore
from shoal.engine.execution.runner import PendingStep
from shoal.engine.scheduling.scheduler import Batch, StepOutput

Poisonous = Callable[[Batch], bool]


class Lost:
    """A pending step whose wait fails."""

    def __init__(self, step: PendingStep) -> None:
        self.batch = step.batch

    def wait(self) -> StepOutput:
        raise RuntimeError("the device failed")


@contextmanager
def poisoned(core: EngineCore, poisonous: Poisonous, *, after: bool = False) -> Iterator[list[Batch]]:
    """Fail the launch of batches for which `poisonous` holds; yield those that failed.

    With `after` their wait fails: the device has written, and the step before has been committed.
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
    """Match batches that contain one of these ids."""
    return lambda batch: any(sequence.id in ids for sequence in batch.sequences())


class FlakyDecoder:
    """Streaming decoder that fails some calls, half of them after writing its state."""

    backend = "eager"

    def __init__(self, core: EngineCore, chance: Callable[[], bool], rng: Random) -> None:
        self._real, self._chance, self._rng = core.audio_decoder._decoder, chance, rng
        self.past = self._real.past
        self.failed = 0

    @property
    def _seen(self) -> list[int]:
        return self._real._seen

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        fails = self._chance()
        if fails and self._rng.random() < 0.5:
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
