"""Measure an engine with many slots, and compare some of its requests with the same requests alone.

    python -m scripts.many_voices --model random:s1-mini --voices 1,64,192,384,512 --json voices.json

One engine with as many slots as the largest number of voices. For every number a closed loop: each client sends its
next text when the last one is complete; all texts differ and have the same number of frames. Then five of the requests
run alone: `exact` says whether they have the same codes. Prints one line of JSON per number, then step times.

With `--stagger` clients start one after the other during the first request, so that their requests are not in step, as
over HTTP. With `--reference-seconds 10` all requests have one voice of so much audio, which is new to the engine.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.engine.core import EngineCore
from shoal.engine.preprocess import build_turns
from shoal.engine.utterance import Event, Utterance
from shoal.speech import SamplingParams
from shoal.tools.bench.engine import TEXT, load_core, random_voice
from shoal.tools.bench.memory import MemoryGauge, memory_parts
from shoal.tools.bench.percentiles import summarize
from shoal.tools.bench.profile import step_seconds
from shoal.voices.voice import Voice

Figures = dict[str, Any]

_ids = count()


Request = Callable[[EngineCore, int, int], Utterance]  # arguments: engine, number, frames


def utterance(core: EngineCore, number: int, frames: int, voice: Voice | None = None) -> Utterance:
    """Return the request of that number: its text and seed depend on the number only."""
    turns = build_turns(f"{number} {number % 7}. {TEXT}", voice, core.checkpoint)
    return Utterance(next(_ids), turns, SamplingParams(seed=number, max_frames=frames))


class LiveTime:
    """Frames and time while all clients have a request: neither the start of a run nor its end."""

    def __init__(self, core: EngineCore, voices: int) -> None:
        self._core, self._voices = core, voices
        self._began: tuple[float, int] | None = None
        self._ended = (0.0, 0)

    def note(self) -> None:
        """Note the state after a step."""
        if len(self._core.tracker.active) == self._voices:
            self._ended = time.perf_counter(), self._core.tracker.stats.frames
            self._began = self._began or self._ended

    @property
    def frames_per_second(self) -> float | None:
        """Return frames per second while all clients were live; None if that was never so, or for one step only."""
        if self._began is None or self._began == self._ended:
            return None
        return (self._ended[1] - self._began[1]) / (self._ended[0] - self._began[0])


def closed_loop(
    core: EngineCore, voices: int, frames: int, each: int, request: Request = utterance, *, stagger: bool = False
) -> tuple[Figures, dict[int, NDArray[np.int32]]]:
    """Run `each` requests per client; return the figures, and the codes of the requests to compare by number.

    With `stagger` the clients start at even intervals over the first `frames` steps.
    """
    core.pool.clear_cache()
    waiting, waits, steps = dict[int, float](), list[float](), core.stats.steps
    requests: list[Utterance] = []
    live, saved = LiveTime(core, voices), core.pool.stats.tokens_saved
    began = time.perf_counter()
    while len(requests) < voices * each or not core.idle:
        started = min(voices, 1 + (core.stats.steps - steps) * voices // frames) if stagger else voices
        while len(requests) < voices * each and len(core.tracker.active) < started:
            requests.append(request(core, len(requests), frames))
            waiting[requests[-1].id] = time.perf_counter()
            core.add(requests[-1])
        waits += _step(core, waiting)
        live.note()
    seconds, frame_rate = time.perf_counter() - began, core.checkpoint.codec.config.frame_rate
    audio, rate = len(requests) * frames / frame_rate, live.frames_per_second
    figures = {"voices": voices, "requests": len(requests), "seconds": seconds, "audio_per_second": audio / seconds}
    figures |= {"live_audio_per_second": None if rate is None else rate / frame_rate}
    figures |= {"steps": core.stats.steps - steps, "first_audio": summarize(waits)}
    figures |= {"prompt_tokens_shared": core.pool.stats.tokens_saved - saved}
    return figures, {number: requests[number].all_codes() for number in compared(voices)}


def _step(core: EngineCore, waiting: dict[int, float]) -> list[float]:
    """Run one step; return the times to first audio of the requests that get theirs. Raises their errors."""
    waits = []

    def note(event: Event) -> None:
        if event.error is not None:
            raise event.error
        if (asked := waiting.pop(event.utterance.id, None)) is not None:
            waits.append(time.perf_counter() - asked)

    for event in core.step(note):
        note(event)
    return waits


def compared(voices: int) -> list[int]:
    """Return the numbers of the requests that also run alone: from the beginning, the middle and the end of a batch."""
    return sorted({0, voices // 3, voices // 2, max(0, voices - 2), voices - 1})


def alone(core: EngineCore, number: int, frames: int, request: Request = utterance) -> NDArray[np.int32]:
    """Return the codes of a request that runs alone, without blocks of earlier ones."""
    core.pool.clear_cache()
    single = request(core, number, frames)
    core.add(single)
    while not core.idle:
        _step(core, {})
    return single.all_codes()


def measure(
    core: EngineCore,
    voices: int,
    frames: int,
    each: int,
    singles: dict[int, NDArray[np.int32]],
    request: Request = utterance,
    *,
    stagger: bool = False,
) -> Figures:
    """Measure one number of voices; `singles` keeps the codes of requests that ran alone."""
    figures, codes = closed_loop(core, voices, frames, each, request, stagger=stagger)
    for number in codes.keys() - singles.keys():
        singles[number] = alone(core, number, frames, request)
    return figures | {"exact": {number: bool(np.array_equal(codes[number], singles[number])) for number in codes}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:s1-mini")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantize", help="weights: int8, int4, fp8; by default as stored")
    parser.add_argument("--voices", default="1,64,128,192,256,384,512", help="numbers of clients, separated by commas")
    parser.add_argument("--frames", type=int, default=200, help="frames per request")
    parser.add_argument("--each", type=int, default=2, help="requests per client")
    parser.add_argument("--stagger", action="store_true", help="start the clients one after the other")
    parser.add_argument(
        "--reference-seconds", type=float, default=0.0, help="audio of a voice of all requests; 0: no voice"
    )
    parser.add_argument("--json", type=Path, help="file for the results; written after each number")
    given = parser.parse_args()
    sizes = [int(size) for size in given.voices.split(",")]
    began = time.perf_counter()
    core = load_core(given.model, given.device, max(sizes), given.quantize)
    core.warm_up()
    results: Figures = {"start": time.perf_counter() - began, "memory": memory_parts(core), "runs": []}
    closed_loop(core, min(8, max(sizes)), 4, 1)  # warm-up
    singles: dict[int, NDArray[np.int32]] = {}
    voice = random_voice(core.checkpoint, given.reference_seconds) if given.reference_seconds else None
    request = partial(utterance, voice=voice)
    for voices in sizes:
        run = measure(core, voices, given.frames, given.each, singles, request, stagger=given.stagger)
        results["runs"].append(run)
        print(json.dumps(results["runs"][-1]), flush=True)
        write(given.json, results)
    results["step_seconds"] = {voices: step_seconds(core, voices) for voices in sizes}
    results["memory"]["peak"] = MemoryGauge(core.checkpoint.model.device).peak()
    print(json.dumps(results["step_seconds"]))
    write(given.json, results)


def write(path: Path | None, results: Figures) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
