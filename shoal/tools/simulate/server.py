"""One GPU of the fleet: the real scheduler over real blocks, and a device that only takes time."""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from shoal.config import EngineConfig
from shoal.engine.blocks import BlockPool
from shoal.engine.chunks import chunk_frames
from shoal.engine.scheduler import Scheduler, StepOutput
from shoal.engine.sequence import Sequence, Tokens
from shoal.speech import Sampling
from shoal.tools.simulate.costs import EngineCosts
from shoal.tools.simulate.traffic import Arrival

STOP_ID = -1


@dataclass(frozen=True)
class Fleet:
    """What every GPU of it is like, and how long prompts are."""

    costs: EngineCosts
    config: EngineConfig = field(default_factory=EngineConfig)
    blocks: int = 4096  # of KV memory
    voice_columns: int = 250  # of a prompt: those of the voice, which can be shared,
    text_columns: int = 50  # and those of the text, which cannot
    longest: int = 8192


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way."""

    number: int
    arrival: Arrival
    frames: int
    first_audio: float | None = None  # when it came
    ended: float | None = None
    failed: bool = False
    moves: int = 0  # to other servers
    decoded: int = 0  # frames that have been heard

    def hear(self, frames: int, now: float) -> None:
        self.decoded += frames
        self.first_audio = now if self.first_audio is None else self.first_audio
        self.ended = now if self.decoded >= self.frames else None

    def start_over(self) -> None:
        """Its server is gone, and nobody has heard anything of it."""
        self.moves += 1
        self.decoded = 0


class SimulatedServer:
    """Steps as long as there is work; whoever drives it asks when the step is over."""

    def __init__(self, id: str, zone: int, fleet: Fleet) -> None:
        self.id, self.zone, self.fleet = id, zone, fleet
        self.alive, self.busy = True, False
        self.generation = 1
        self.busy_seconds = 0.0
        self._now = 0.0
        self._columns = np.zeros((fleet.config.slots, 2), np.int32)
        self._power_on()

    def _power_on(self) -> None:
        """With nothing in memory."""
        fleet, config = self.fleet, self.fleet.config
        self.speeches: dict[int, SimulatedRequest] = {}
        self._under_way: StepOutput | None = None
        self.scheduler = Scheduler(
            BlockPool(fleet.blocks, config.block_size, caching=config.prefix_cache),
            slots=config.slots,
            token_budget=config.token_budget,
            stop_id=STOP_ID,
            max_tokens=fleet.longest,
            clock=lambda: self._now,
        )

    @property
    def load(self) -> int:
        return len(self.speeches)

    def take(self, speech: SimulatedRequest) -> None:
        self.speeches[speech.number] = speech
        prompt = self._prompt(speech)
        most = min(self.fleet.longest, len(prompt) + speech.frames)
        self.scheduler.add(Sequence.start(speech.number, prompt, Sampling(max_frames=speech.frames), most))

    def begin_step(self, now: float) -> float | None:
        """When the step that begins now will be over; None when there is nothing to do."""
        self._now = now
        batch = self.scheduler.plan()
        self.busy = bool(batch)
        if not batch:
            return None
        rows = len(batch.sampled())
        columns = sum(each.end - each.start for each in batch.prefills)
        self._under_way = StepOutput(batch, self._columns[:rows])
        seconds = self.fleet.costs.of_step(rows, columns)
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> float:
        """When the audio of the step is there, and the next one can begin."""
        assert self._under_way is not None, "a step begins before it ends"
        drawn, self._under_way = self._under_way, None
        self._now = now
        due = [each for progress in self.scheduler.commit(drawn) if (each := self._advance(progress.sequence))]
        seconds = self.fleet.costs.of_decoding([frames for _, frames in due])
        self.busy_seconds += seconds
        for speech, frames in due:
            speech.hear(frames, now + seconds)
        return now + seconds

    def die(self) -> list[SimulatedRequest]:
        """Everything it had is gone; those are whose it was."""
        lost = list(self.speeches.values())
        self.alive, self.busy = False, False
        self.generation += 1
        self._power_on()
        return lost

    def _advance(self, sequence: Sequence) -> tuple[SimulatedRequest, int] | None:
        """Whose audio is due now, and how many frames of it."""
        speech, ended = self.speeches[sequence.id], sequence.finish is not None
        frames = self._due(speech, sequence.frames, ended=ended)
        if ended:
            self.scheduler.release(sequence)
            del self.speeches[sequence.id]
        return (speech, frames) if frames else None

    def _due(self, speech: SimulatedRequest, frames: int, *, ended: bool) -> int:
        """Frames that are decoded now: none until there are enough for a chunk, all at the end."""
        config, backlog = self.fleet.config, frames - speech.decoded
        heard = (self._now - (speech.first_audio or self._now)) * self.fleet.costs.frame_rate
        wanted = chunk_frames(
            speech.decoded, speech.decoded - heard, config.first_chunk_frames, config.max_chunk_frames
        )
        return backlog if ended or backlog >= wanted else 0

    def _prompt(self, speech: SimulatedRequest) -> Tokens:
        """Tokens that are equal as far as the voice goes, and then differ."""
        fleet, voice = self.fleet, speech.arrival.voice
        shared = fleet.voice_columns if voice is not None else 0
        prompt = np.zeros((shared + fleet.text_columns, 2), np.int32)
        prompt[:shared, 0] = int.from_bytes(blake2b((voice or "").encode(), digest_size=3).digest(), "little")
        prompt[shared:, 0] = speech.number
        prompt[shared:, 1] = 1
        return prompt
