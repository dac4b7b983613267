"""Fault injection for engines in another process."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from shoal.engine.process.worker import EngineSource

Rig = Callable[[], None]


@dataclass(frozen=True)
class RiggedSource(EngineSource):
    """Calls `rig` in the engine process, before the engine is loaded."""

    rig: Rig = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        plain = {each.name: getattr(self, each.name) for each in fields(EngineSource)}
        return _arrive, (self.rig, plain)


def _arrive(rig: Rig, plain: dict[str, Any]) -> EngineSource:
    rig()
    return EngineSource(**plain)


class Gate:
    """Blocks encoding and decoding in the engine process until `open` is called, and counts the calls."""

    def __init__(self, place: Path) -> None:
        self._open, self._seen = place / "open", place / "seen"
        self._seen.touch()

    @property
    def seen(self) -> int:
        return len(self._seen.read_bytes())

    def open(self) -> None:
        self._open.touch()

    @property
    def rig(self) -> Rig:
        return partial(_shut, self)

    def wait(self) -> None:
        with self._seen.open("ab") as file:
            file.write(b".")
        while not self._open.exists():
            time.sleep(0.01)


def _shut(gate: Gate) -> None:
    from shoal.engine.service import Service
    from shoal.voices.encoder import CodecEncoder

    for owner, name in ((CodecEncoder, "encode"), (Service, "decode")):
        setattr(owner, name, _behind(gate, getattr(owner, name)))


def _behind(gate: Gate, work: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*given: Any) -> Any:
        gate.wait()
        return work(*given)

    return waiting


POISON_SEED = 666


def break_the_device() -> None:
    """Make a step with a request of POISON_SEED fail, and every step after it, as after a sticky CUDA error."""
    from shoal.engine.execution.runner import PipelinedRunner
    from shoal.engine.scheduling.scheduler import Batch

    launch, broken = PipelinedRunner.launch, list[Batch]()

    def launch_or_break(self: PipelinedRunner, batch: Batch) -> None:
        if any(sequence.sampling.seed == POISON_SEED for sequence in batch.sequences()):
            broken.append(batch)
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        launch(self, batch)

    PipelinedRunner.launch = launch_or_break  # type: ignore[method-assign]


def reject_the_first() -> None:
    """Reject the output of the first request, so that it is retried."""
    from shoal.audio.guard import SpeechDefect
    from shoal.engine.request_tracker import RequestTracker
    from shoal.engine.utterance import Utterance

    judge, findings = RequestTracker._check_speech, [SpeechDefect.SILENT]

    def judge_or_reject(self: RequestTracker, utterance: Utterance, *given: Any, **named: Any) -> SpeechDefect | None:
        asked_for = utterance.id >= 0  # negative ids are warm-up
        return findings.pop() if findings and asked_for else judge(self, utterance, *given, **named)

    RequestTracker._check_speech = judge_or_reject  # type: ignore[method-assign]


def break_the_thread(mark: Path) -> None:
    """End the engine thread by an error outside of a batch, once, when the file `mark` exists."""
    from shoal.engine.core import EngineCore
    from shoal.engine.utterance import Event

    step = EngineCore.step

    def step_or_break(self: EngineCore, emit: Callable[[Event], None] | None = None) -> list[Event]:
        if mark.exists() and not self.idle:
            mark.unlink()
            raise AssertionError("a bug")
        return step(self, emit)

    EngineCore.step = step_or_break  # type: ignore[method-assign]


def break_batches() -> None:
    """Make plain frames of more than one row fail, as a kernel that does not fit the device would."""
    from shoal.engine.execution.plain_graphs import PlainFrame

    run = PlainFrame.run

    def run_or_fail(self: PlainFrame) -> None:
        if self.inputs.shape[1] > 1:
            raise RuntimeError("out of resource: shared memory")
        run(self)

    PlainFrame.run = run_or_fail  # type: ignore[method-assign]
