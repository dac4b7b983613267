"""Figures of a stage from the outcomes of its requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.tools.bench.load.client import LoadOutcome
from shoal.tools.bench.load.playback import BUFFERS
from shoal.tools.bench.load.stage import LoadStage
from shoal.tools.bench.percentiles import Percentiles, summarize

WINDOWS = 40  # windows of the timeline


@dataclass(frozen=True, slots=True)
class Objective:
    """Service level objective. A request is good if its audio starts in time and playback never stalls."""

    first_audio: float = 0.5  # maximum time to first audio in seconds
    buffer: float = 0.1  # playback buffer in seconds; one of BUFFERS
    share: float = 0.99  # minimum share of good requests

    def met_by(self, outcome: LoadOutcome) -> bool:
        return (
            outcome.error is None
            and outcome.first_audio is not None
            and outcome.first_audio <= self.first_audio
            and outcome.stalled[BUFFERS.index(self.buffer)] == 0.0
        )

    def kept_by(self, outcomes: Sequence[LoadOutcome]) -> bool:
        """Return whether enough requests are good; False without any requests."""
        return bool(outcomes) and sum(map(self.met_by, outcomes)) >= self.share * len(outcomes)


def summarize_stage(stage: LoadStage, outcomes: Sequence[LoadOutcome], objective: Objective) -> dict[str, Any]:
    """Return the figures of a stage. Rates refer to the time until the last request has ended.

    Complete answers without audio are counted as `empty`: they are not server errors, miss the objective, and
    have no part in latency and throughput.
    """
    outcomes = sorted(outcomes, key=lambda each: each.number)
    done = [each for each in outcomes if each.spoken]
    seconds = max([stage.seconds, *(each.due + each.seconds for each in outcomes)])
    good = sum(objective.met_by(each) for each in outcomes)
    return {
        "name": stage.name,
        "arrivals": stage.arrivals,
        "load": stage.last,
        "ramp_from": stage.first if stage.first != stage.last else None,
        "seconds": seconds,
        "requests": len(outcomes),
        "errors": dict(Counter(each.error for each in outcomes if each.error is not None)),
        "empty": sum(each.empty for each in outcomes),
        "throughput": len(done) / seconds,
        "audio_per_second": sum(each.audio_seconds for each in done) / seconds,
        "goodput": good / seconds,
        "good_share": good / len(outcomes) if outcomes else None,
        "kept": objective.kept_by(outcomes),
        "first_audio": summarize(each.first_audio for each in done if each.first_audio is not None),
        "latency": summarize(each.seconds for each in done),
        "rtf": summarize(each.seconds / each.audio_seconds for each in done),
        "starved": [starvation(done, at) for at in range(len(BUFFERS))],
        "sender_late": summarize(each.late for each in outcomes),
        "timeline": timeline(outcomes, seconds),
        "outcomes": [{name: value for name, value in asdict(each).items() if name != "stalled"} for each in outcomes],
    }


def starvation(done: Sequence[LoadOutcome], at: int) -> dict[str, Any]:
    starved = [each.stalled[at] for each in done if each.stalled[at] > 0]
    return {
        "buffer": BUFFERS[at],
        "share": len(starved) / len(done) if done else None,
        "stalled_seconds": sum(starved) / len(starved) if starved else 0.0,
    }


def timeline(outcomes: Sequence[LoadOutcome], seconds: float) -> list[dict[str, Any]]:
    """Return errors and latency over time, by due time; shows a queue that slowly grows in a soak test."""
    width, rows = seconds / WINDOWS, list[dict[str, Any]]()
    for window in range(WINDOWS):
        here = [each for each in outcomes if window <= each.due / width < window + 1]
        spoken = [each for each in here if each.spoken]
        firsts = Percentiles.of(each.first_audio for each in spoken if each.first_audio is not None)
        if here:
            rows.append(
                {
                    "at": (window + 0.5) * width,
                    "requests": len(here),
                    "errors": sum(each.error is not None for each in here),
                    "first_audio_p50": firsts and firsts.p50,
                    "first_audio_p95": firsts and firsts.p95,
                }
            )
    return rows
