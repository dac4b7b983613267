"""Time costs of one engine, fitted to the results of `shoal bench engine --json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InvalidRequest
from shoal.tools.bench.document import read_document


@dataclass(frozen=True)
class CostCurve:
    """Piecewise linear function of the batch size through measured points.

    Constant below the first point, extrapolated beyond the last.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, batch: float) -> float:
        if len(self.points) == 1 or batch <= self.points[0][0]:
            return self.points[0][1]
        (left, low), (right, high) = next(((a, b) for a, b in pairwise(self.points) if batch <= b[0]), self.points[-2:])
        return low + (high - low) * (batch - left) / (right - left)


@dataclass(frozen=True)
class EngineCosts:
    """Time costs of one engine, in seconds."""

    step: CostCurve  # per step, by the number of frames it generates
    token: float  # per prompt token that is not in the prefix cache
    call: float  # per call of the codec
    chunk: float  # per chunk in a call of the codec
    frame: float  # per frame that the codec computes
    frame_rate: float  # frames per second of audio
    source: str = ""  # model and machine
    packed: bool = False  # chunks are concatenated without padding; otherwise each is padded to the longest

    def of_step(self, frames: int, tokens: int) -> float:
        """Return the seconds of a step that generates `frames` frames, or none, and prefills `tokens` tokens."""
        return (self.step.at(frames) if frames else 0.0) + self.token * tokens

    def of_decoding(self, chunks: Sequence[int]) -> float:
        """Return the seconds of one codec call for chunks of the given lengths in frames."""
        if not chunks:
            return 0.0
        frames = sum(chunks) if self.packed else len(chunks) * max(chunks)
        return self.call + len(chunks) * self.chunk + frames * self.frame


def read_costs(path: Path) -> EngineCosts:
    """Read costs from a file. Raises InvalidRequest if it is not a complete engine benchmark."""
    document = read_document(path)
    try:
        return fit(document)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        raise InvalidRequest(f"{path} is not a complete file of `shoal bench engine --json`: run it again") from None


def fit(document: dict[str, Any]) -> EngineCosts:
    """Fit costs to the rows with continuous batching and to the first-audio times with and without a cached voice."""
    (run,) = document["runs"]
    rows = [row for row in run["throughput"] if row["policy"] == "continuous"]
    rows.sort(key=_running)
    first = run["first_audio"]
    saved = first["known"]["tokens_saved"] - first["unknown"]["tokens_saved"]
    packed = run.get("packed", False)  # missing in older benchmarks, as is `all_frames`
    call, chunk, frame = _decoding([each for row in run["throughput"] for each in row["decodes"]], packed)
    return EngineCosts(
        step=CostCurve(tuple((_running(row), _step_seconds(row)) for row in rows)),
        token=max(0.0, first["unknown"]["seconds"] - first["known"]["seconds"]) / saved,
        call=call,
        chunk=chunk,
        frame=frame,
        frame_rate=rows[0]["frames"] / rows[0]["audio_seconds"],
        source=f"{run['name']} on {document['machine']['device']}",
        packed=packed,
    )


def _decoding(calls: list[dict[str, Any]], packed: bool) -> list[float]:
    """Fit seconds per call, per chunk and per frame by weighted least squares, with no negative coefficient."""
    frames = [each["all_frames"] if packed else each["chunks"] * each["frames"] for each in calls]
    chunks = [each["chunks"] for each in calls]
    sizes = np.array([(1, *sizes) for sizes in zip(chunks, frames, strict=True)], np.float64)
    weights = np.sqrt([each["calls"] for each in calls])
    seconds = np.array([each["seconds"] / each["calls"] for each in calls])
    costs, active = np.zeros(3), np.ones(3, bool)
    while active.any():
        fitted = np.linalg.lstsq(sizes[:, active] * weights[:, None], seconds * weights, rcond=None)[0]
        if (fitted >= 0).all():
            costs[active] = fitted
            break
        active[np.flatnonzero(active)[fitted.argmin()]] = False
    return [float(cost) for cost in costs]


def _running(row: dict[str, Any]) -> float:
    """Return the mean number of frames per step."""
    return float(row["frames"] / row["steps"])


def _step_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a step without the codec: model and host."""
    return float((row["seconds"] - row["codec_seconds"]) / row["steps"])
