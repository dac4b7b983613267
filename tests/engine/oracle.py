"""Test oracle: the output of `generate` and of the codec over a whole utterance."""

from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.engine.core import EngineCore
from shoal.engine.execution.runner import PipelinedRunner
from shoal.engine.output.audio_decoder import AudioDecoder
from shoal.engine.scheduling.sequence import Tokens
from shoal.engine.utterance import Event, Turn, Utterance
from shoal.errors import ShoalError
from shoal.model.generate import generate
from shoal.model.slow import Head
from shoal.speech import FinishReason, Samples, SamplingParams
from shoal.text.prompt import Codes


@dataclass(frozen=True)
class OracleOutput:
    codes: Codes
    finish: FinishReason
    samples: Samples


@dataclass
class Oracle:
    """Generates the expected output of requests one by one, cached, because `generate` is slow."""

    checkpoint: Checkpoint
    context_tokens: int = 0
    _known: dict[tuple[object, ...], OracleOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head = Head(self.checkpoint.model.slow)

    def speak(self, turns: list[Turn], sampling: SamplingParams, attempt: int = 0) -> OracleOutput:
        key = (*(turn.prompt.tobytes() for turn in turns), sampling, attempt, self.context_tokens)
        if key not in self._known:
            self._known[key] = self._speak(Utterance(0, turns, sampling, attempt=attempt))
        return self._known[key]

    def _speak(self, utterance: Utterance) -> OracleOutput:
        collected, tokens, finish = list[Codes](), None, None
        for number, turn in enumerate(utterance.turns):
            utterance.turn = number
            prompt = self._prompt(tokens, turn)
            answer = generate(
                self.checkpoint.model, self.head, torch.from_numpy(prompt.T.copy()), utterance.turn_sampling()
            )
            codes, finish = answer.codes.numpy().astype(np.int32), answer.finish
            collected.append(codes)
            tokens = np.concatenate((prompt, self._frames(codes)))
        assert finish is not None
        codes = np.concatenate(collected, axis=1)
        return OracleOutput(codes, finish, self._samples(codes))

    def _prompt(self, before: Tokens | None, turn: Turn) -> Tokens:
        longest = self.context_tokens or self.checkpoint.model.config.max_prompt
        if before is None or len(before) + len(turn.continuation) > longest:
            return turn.prompt
        return np.concatenate((before, turn.continuation))

    def _frames(self, codes: Codes) -> Tokens:
        semantic = codes[:1] + self.checkpoint.model.config.semantic_begin_id
        return np.concatenate((semantic, codes)).T.astype(np.int32)

    def _samples(self, codes: Codes) -> Samples:
        if not codes.shape[1]:
            return np.zeros(0, np.float32)
        samples: Samples = self.checkpoint.codec.decode(torch.from_numpy(codes.astype(np.int64))[None])[0].numpy()
        return samples


@dataclass
class Received:
    """Everything received of one utterance."""

    utterance: Utterance
    chunks: list[Samples] = field(default_factory=list)
    finish: FinishReason | None = None
    error: ShoalError | None = None
    ends: int = 0

    @property
    def samples(self) -> Samples:
        return np.concatenate([np.zeros(0, np.float32), *self.chunks])

    @property
    def codes(self) -> Codes:
        return self.utterance.all_codes()

    def equals(self, expected_output: OracleOutput) -> bool:
        return (
            self.finish is expected_output.finish
            and self.error is None
            and np.array_equal(self.codes, expected_output.codes)
            and len(self.samples) == len(expected_output.samples)
            and np.allclose(self.samples, expected_output.samples, rtol=0, atol=1e-5)
        )


class StepDriver:
    """Steps a core and collects the output of all its utterances."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.received: dict[int, Received] = {}

    def add(self, utterance: Utterance) -> Received:
        self.received[utterance.id] = Received(utterance)
        self.core.add(utterance)
        return self.received[utterance.id]

    def step(self) -> None:
        """Step as the engine thread does: audio arrives while the device computes."""
        for event in self.core.step(self._receive):
            self._receive(event)

    def _receive(self, event: Event) -> None:
        received = self.received[event.utterance.id]
        assert not received.ends, "no event after the last one"
        received.ends += event.last
        received.error = event.error
        if event.chunk is not None:
            received.chunks.append(event.chunk.samples)
            received.finish = event.chunk.finish

    def run(self, max_steps: int = 5000) -> None:
        """Step until all utterances have ended."""
        for _ in range(max_steps):
            if self.core.idle:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


def force_overlap(core: EngineCore, overlap: bool) -> None:
    """Emulate graphs, which run asynchronously: collect audio in the next step, whichever decoder is in use."""
    # A property, so that the decoder cannot set it to what its backend does.
    forced = property(lambda decoder: overlap, lambda decoder, value: None)
    core.audio_decoder.__class__ = type("ForcedOverlap", (AudioDecoder,), {"overlap": forced})
    assert core.audio_decoder.overlap == overlap


def run_with_lag(core: EngineCore, lag: int) -> None:
    """Emulate a GPU: frames are returned `lag` steps after their launch, samples one step later."""
    core.runner.lag = lag
    force_overlap(core, lag > 0)
    core.runner.runner = PipelinedRunner(core.runner.runner.launcher, lag)


def assert_nothing_leaked(core: EngineCore) -> None:
    """Check that no slot, block, sequence or codec state is left, except codec slots that the next call resets."""
    scheduler = core.scheduler
    assert core.idle
    assert (scheduler.active, core.pool.used) == (0, 0)
    assert core.pool.available == core.pool.count
    assert sorted(scheduler._free_slots) == list(range(core.config.slots))
    assert not scheduler._waiting_since
    seen = {slot for slot, frames in enumerate(core.audio_decoder._decoder._seen) if frames}
    assert seen <= core.audio_decoder._stale
