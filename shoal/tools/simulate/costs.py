"""What the work of one engine costs in time, read from what `shoal bench engine --json` measured."""

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
    """A measured quantity by batch size: straight lines between the points, and on beyond the last."""

    points: tuple[tuple[float, float], ...]

    def at(self, batch: float) -> float:
        if len(self.points) == 1 or batch <= self.points[0][0]:
            return self.points[0][1]
        (left, low), (right, high) = next(((a, b) for a, b in pairwise(self.points) if batch <= b[0]), self.points[-2:])
        return low + (high - low) * (batch - left) / (right - left)


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of one engine."""

    step: CostCurve  # per step, by the frames it draws
    column: float  # per column of a prompt that has to be computed
    call: float  # per call of the codec,
    chunk: float  # per chunk that is decoded in it,
    frame: float  # and per frame that it computes
    frame_rate: float  # frames per second of audio
    source: str = ""  # model and machine
    packed: bool = False  # chunks are decoded one behind the other; else each is as long as the longest

    def of_step(self, frames: int, columns: int) -> float:
        return self.step.at(frames) + self.column * columns

    def of_decoding(self, chunks: Sequence[int]) -> float:
        """Of chunks of so many frames, decoded together."""
        if not chunks:
            return 0.0
        frames = sum(chunks) if self.packed else len(chunks) * max(chunks)
        return self.call + len(chunks) * self.chunk + frames * self.frame


def read_costs(path: Path) -> EngineCosts:
    """Raises InvalidRequest when the file is not a whole benchmark of the engine."""
    document = read_document(path)
    try:
        return fit(document)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        raise InvalidRequest(f"{path} is not what `shoal bench engine --json` writes, or not all of it") from None


def fit(document: dict[str, Any]) -> EngineCosts:
    """EngineCosts from the rows of continuous batching, and from first audio with a voice known and unknown."""
    (run,) = document["runs"]
    rows = [row for row in run["throughput"] if row["policy"] == "continuous"]
    rows.sort(key=_running)
    first = run["first_audio"]
    saved = first["known"]["columns_saved"] - first["unknown"]["columns_saved"]
    packed = run.get("packed", False)  # older benchmarks do not tell, nor count all frames
    call, chunk, frame = _decoding([each for row in run["throughput"] for each in row["decodes"]], packed)
    return EngineCosts(
        step=CostCurve(tuple((_running(row), _step_seconds(row)) for row in rows)),
        column=max(0.0, first["unknown"]["seconds"] - first["known"]["seconds"]) / saved,
        call=call,
        chunk=chunk,
        frame=frame,
        frame_rate=rows[0]["frames"] / rows[0]["audio_seconds"],
        source=f"{run['name']} on {document['machine']['device']}",
        packed=packed,
    )


def _decoding(calls: list[dict[str, Any]], packed: bool) -> list[float]:
    """Seconds per call, per chunk and per frame: those that explain all calls best, and none of them negative."""
    frames = [each["all_frames"] if packed else each["chunks"] * each["frames"] for each in calls]
    chunks = [each["chunks"] for each in calls]
    sizes = np.array([(1, *sizes) for sizes in zip(chunks, frames, strict=True)], np.float64)
    often = np.sqrt([each["calls"] for each in calls])
    seconds = np.array([each["seconds"] / each["calls"] for each in calls])
    costs, kept = np.zeros(3), np.ones(3, bool)
    while kept.any():
        found = np.linalg.lstsq(sizes[:, kept] * often[:, None], seconds * often, rcond=None)[0]
        if (found >= 0).all():
            costs[kept] = found
            break
        kept[np.flatnonzero(kept)[found.argmin()]] = False
    return [float(cost) for cost in costs]


def _running(row: dict[str, Any]) -> float:
    return float(row["frames"] / row["steps"])


def _step_seconds(row: dict[str, Any]) -> float:
    """All of a step but the decoding: the model and the host."""
    return float((row["seconds"] - row["codec_seconds"]) / row["steps"])
