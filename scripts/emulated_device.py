"""An emulated GPU: the scheduler, the request tracker and the pipe of an engine run as always, but a step only waits.

Steps take as long as they were measured on an H200, and the codec returns silence after its time beside a step. So
policies and processes can be measured on a machine without a GPU. Its figures are predictions for the card, not
measurements.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

FRAME_LENGTH = 2048
PROMPT_GRAPH_TOKENS = 512
LARGE_PROMPT_TIME = 0.91  # time of a graph of 1,024 or 2,048 tokens, relative to the 512-token graphs that it replaces
# Seconds of a codec call and of each of its frames beside a step of the model, whose time includes them.
CODEC_SECONDS, CODEC_FRAME_SECONDS = 0.65e-3, 0.02e-3


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds of a step on an H200, with its share of the codec, and the prompt tokens that a step computes."""

    size: str  # random model whose prompts and frames are emulated: tiny or tiny-s2
    step: float  # seconds of a step that samples frames
    row: float  # additional seconds per sequence of such a step
    prompt: float  # seconds per prompt graph of up to 512 tokens
    prompt_token: float  # additional seconds per prompt token
    token_budget: int
    large_prompts: tuple[int, ...]  # sizes of larger prompt graphs

    def of_step(self, sampled: int, prompt_tokens: int) -> float:
        """Return the seconds of a step."""
        frames = self.step + self.row * sampled if sampled else 0.0
        return frames + self.of_prompts(prompt_tokens)

    def of_prompts(self, tokens: int) -> float:
        """Return the seconds of the prompt graphs of a step."""
        from shoal.engine.execution.graphs import prompt_chunks  # imports torch, which the server process has not

        seconds = 0.0
        for size, count in prompt_chunks(tokens, (PROMPT_GRAPH_TOKENS, *self.large_prompts)):
            large = size > PROMPT_GRAPH_TOKENS
            seconds += LARGE_PROMPT_TIME * self.of_graphs(size) if large else self.of_graphs(count)
        return seconds

    def of_graphs(self, tokens: int) -> float:
        """Return the seconds of prompt graphs of at most 512 tokens."""
        return self.prompt * -(-tokens // PROMPT_GRAPH_TOKENS) + self.prompt_token * tokens

    def of_frame(self, rows: int) -> float:
        """Return the seconds of a frame graph. About half of what a sequence adds to a step is its audio."""
        return self.step + self.row / 2 * rows


DEVICES = {
    "s1-mini": DeviceTimes("tiny", 1.06e-3, 0.035e-3, 0.6e-3, 3.6e-6, 2048, (1024, 2048)),
    "s2-pro": DeviceTimes("tiny-s2", 5.2e-3, 0.035e-3, 0.0, 22e-6, 512, (1024,)),
    "s2-pro-w8a8": DeviceTimes("tiny-s2", 3.63e-3, 0.035e-3, 0.0, 15.5e-6, 512, (1024,)),
}


def silence(counts: list[int], ready: float) -> list[np.ndarray]:
    """Return silence for these numbers of frames once the clock reads `ready`."""
    time.sleep(max(0.0, ready - time.perf_counter()))
    return [np.zeros(count * FRAME_LENGTH, np.float32) for count in counts]


def emulate_device(times: DeviceTimes, frames: int) -> None:
    """Replace model and codec of this process by waits of their duration; the model stops after `frames` frames."""
    import shoal.checkpoint.random as random
    from shoal.engine.execution.runner import EagerRunner
    from shoal.engine.output.audio_decoder import AudioDecoder, Fetch
    from shoal.engine.scheduling.scheduler import Batch, StepOutput

    config, codec = random.SIZES[times.size]
    codec = replace(codec, sample_rate=44_100, encoder_rates=(2, 4, 8, 8), decoder_rates=(8, 8, 4, 2))
    random.SIZES[times.size] = config, codec
    generator = np.random.default_rng(0)
    end = 0.0  # time at which the last launched step ends

    class EmulatedStep:
        def __init__(self, batch: Batch, tokens: np.ndarray, end: float) -> None:
            self.batch, self.tokens, self.end = batch, tokens, end

        def wait(self) -> StepOutput:
            time.sleep(max(0.0, self.end - time.perf_counter()))
            return StepOutput(self.batch, self.tokens, {})

    def launch(runner: EagerRunner, batch: Batch) -> EmulatedStep:
        nonlocal end
        sequences = [sequence for sequence, _ in batch.sampled()]
        prompt = sum(prefill.end - prefill.start for prefill in batch.prefills)
        end = max(end, time.perf_counter()) + times.of_step(len(sequences), prompt)
        tokens = generator.integers(0, 100, (len(sequences), 1 + config.num_codebooks)).astype(np.int32)
        tokens[:, 0] += config.semantic_begin_id
        tokens[[sequence.frames >= frames - 1 for sequence in sequences], 0] = config.stop_id
        return EmulatedStep(batch, tokens, end)

    def decode(decoder: AudioDecoder, codes: np.ndarray, slots: list[int], lengths: list[int] | None = None) -> Fetch:
        counts = lengths or [codes.shape[-1]] * len(slots)
        # Long calls end with the step at the latest: their share of the GPU is in the step's time.
        seconds = min(CODEC_SECONDS + CODEC_FRAME_SECONDS * sum(counts), times.of_step(len(slots), 0))
        return partial(silence, counts, time.perf_counter() + seconds)

    EagerRunner.launch = launch  # type: ignore[method-assign, assignment]
    AudioDecoder._run = decode  # type: ignore[method-assign]
    # As with graphs: audio is collected in the next step, and has the same bits in chunks of any size.
    AudioDecoder.overlap = property(lambda _: True, lambda _, value: None)  # type: ignore[method-assign, assignment]
    AudioDecoder.exact_chunks = True  # type: ignore[method-assign, assignment]
    emulate_times(times)


def emulate_times(times: DeviceTimes) -> None:
    """Replace what the runner measures at start on a GPU."""
    from shoal.engine.execution.fallback import FallbackRunner

    built = FallbackRunner.__init__

    def build(runner: FallbackRunner, *args: object, **options: object) -> None:
        built(runner, *args, **options)  # type: ignore[arg-type]
        runner.lag = runner.runner.lag = 1  # as on a GPU

    FallbackRunner.__init__ = build  # type: ignore[method-assign]
    FallbackRunner.frame_seconds = property(lambda runner: times.of_frame(len(runner._eager.tables)))  # type: ignore[method-assign, assignment]
    FallbackRunner.token_budget = property(lambda _: times.token_budget)  # type: ignore[method-assign, assignment]
    FallbackRunner.token_seconds = property(lambda _: times.of_step(0, PROMPT_GRAPH_TOKENS) / PROMPT_GRAPH_TOKENS)  # type: ignore[method-assign, assignment]
