"""One simulated GPU: the real scheduler and block pool, with a device that only takes time."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.output.chunks import chunk_frames, first_chunk_frames
from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.scheduler import Scheduler, StepOutput, burst_tokens
from shoal.engine.scheduling.sequence import Sequence, Tokens
from shoal.speech import SamplingParams
from shoal.tools.simulate.costs import EngineCosts
from shoal.tools.simulate.traffic import Arrival

STOP_ID = -1


@dataclass(frozen=True)
class Fleet:
    """Properties shared by all GPUs of a fleet, and the length of prompts."""

    costs: EngineCosts
    config: EngineConfig = field(default_factory=EngineConfig)
    blocks: int = 4096  # KV cache blocks per GPU
    voice_tokens: int = 250  # prompt tokens of the voice; shared by its requests through the prefix cache
    text_tokens: int = 50  # prompt tokens of the text; different in every request
    max_tokens: int = 8192  # maximum length of a sequence

    @cached_property
    def first_frames(self) -> int:
        """Frames of the first chunk, chosen by step time as in the engine; without packed codec calls the minimum."""
        step = self.costs.step.at(self.config.slots) if self.costs.packed else math.inf
        return self.config.first_chunk_frames or first_chunk_frames(self.costs.frame_rate, step)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """State of one request. Times are in simulated seconds."""

    number: int
    arrival: Arrival
    frames: int
    first_audio: float | None = None  # time of the first chunk
    ended: float | None = None
    failed: bool = False
    moves: int = 0  # times it was rerouted to another server
    decoded: int = 0  # frames sent to the client

    def add_audio(self, frames: int, now: float) -> None:
        """Record a chunk of `frames` frames that is ready at `now`."""
        self.decoded += frames
        self.first_audio = now if self.first_audio is None else self.first_audio
        self.ended = now if self.decoded >= self.frames else None

    def restart(self) -> None:
        """Reset after a server failure, before any audio was sent."""
        self.moves += 1
        self.decoded = 0


class SimulatedServer:
    """One GPU with its scheduler. The event loop calls `begin_step` and `end_step` at the times they return."""

    def __init__(self, id: str, zone: int, fleet: Fleet) -> None:
        self.id, self.zone, self.fleet = id, zone, fleet
        self.alive, self.busy = True, False
        self.generation = 1  # incremented when the server fails, so that its pending events are dropped
        self.busy_seconds = 0.0
        self._now = 0.0
        self._frames = np.zeros((fleet.config.slots, 2), np.int32)
        self._reset()

    def _reset(self) -> None:
        """Start with an empty scheduler and KV cache."""
        fleet, config = self.fleet, self.fleet.config
        self.requests: dict[int, SimulatedRequest] = {}
        self._in_flight: StepOutput | None = None
        budget = config.token_budget or DEFAULT_TOKEN_BUDGET
        self.scheduler = Scheduler(
            BlockPool(fleet.blocks, config.block_size, caching=config.prefix_cache),
            slots=config.slots,
            token_budget=budget,
            stop_id=STOP_ID,
            max_tokens=fleet.max_tokens,
            burst_tokens=burst_tokens(fleet.costs.frame_rate, budget, fleet.costs.token, config.token_budget),
            clock=lambda: self._now,
        )

    @property
    def load(self) -> int:
        return len(self.requests)

    def add(self, request: SimulatedRequest) -> None:
        self.requests[request.number] = request
        prompt = self._prompt(request)
        max_tokens = min(self.fleet.max_tokens, len(prompt) + request.frames)
        self.scheduler.add(
            Sequence.start(request.number, prompt, SamplingParams(max_frames=request.frames), max_tokens)
        )

    def begin_step(self, now: float) -> float | None:
        """Start a step and return the time at which it ends; None if there is nothing to do."""
        self._now = now
        batch = self.scheduler.plan()
        self.busy = bool(batch)
        if not batch:
            return None
        rows = len(batch.sampled())
        tokens = sum(each.end - each.start for each in batch.prefills)
        self._in_flight = StepOutput(batch, self._frames[:rows])
        seconds = self.fleet.costs.of_step(rows, tokens)
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> float:
        """Decode the audio of the step and return the time at which it is ready and the next step can begin."""
        assert self._in_flight is not None, "end_step without begin_step"
        output, self._in_flight = self._in_flight, None
        self._now = now
        chunks = [each for progress in self.scheduler.commit(output) if (each := self._advance(progress.sequence))]
        seconds = self.fleet.costs.of_decoding([frames for _, frames in chunks])
        self.busy_seconds += seconds
        for request, frames in chunks:
            request.add_audio(frames, now + seconds)
        return now + seconds

    def fail(self) -> list[SimulatedRequest]:
        """Take the server down, drop its state and return the requests that it had."""
        lost = list(self.requests.values())
        self.alive, self.busy = False, False
        self.generation += 1
        self._reset()
        return lost

    def _advance(self, sequence: Sequence) -> tuple[SimulatedRequest, int] | None:
        """Return the request and the frames to decode now; None if its chunk is not complete. Releases the finished."""
        request, ended = self.requests[sequence.id], sequence.finish is not None
        frames = self._frames_to_decode(request, sequence.frames, ended=ended)
        if ended:
            self.scheduler.release(sequence)
            del self.requests[sequence.id]
        return (request, frames) if frames else None

    def _frames_to_decode(self, request: SimulatedRequest, frames: int, *, ended: bool) -> int:
        """Return 0 until the backlog is as long as the next chunk; the whole backlog at the end."""
        config, backlog = self.fleet.config, frames - request.decoded
        first = self.fleet.first_frames
        played = (self._now - (request.first_audio or self._now)) * self.fleet.costs.frame_rate
        wanted = chunk_frames(request.decoded, request.decoded - played, first, config.max_chunk_frames)
        return backlog if ended or backlog >= wanted else 0

    def _prompt(self, request: SimulatedRequest) -> Tokens:
        """Build a prompt whose first tokens depend on the voice only and whose others are unique."""
        fleet, voice = self.fleet, request.arrival.voice
        shared = fleet.voice_tokens if voice is not None else 0
        prompt = np.zeros((shared + fleet.text_tokens, 2), np.int32)
        prompt[:shared, 0] = int.from_bytes(blake2b((voice or "").encode(), digest_size=3).digest(), "little")
        prompt[shared:, 0] = request.number
        prompt[shared:, 1] = 1
        return prompt
