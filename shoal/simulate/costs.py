"""What the work of one engine costs in time, read from what `shoal bench engine --json` measured."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.config import EngineConfig
from shoal.errors import InvalidRequest


@dataclass(frozen=True)
class Curve:
    """A measured quantity by batch size: straight lines between the points, and on beyond the last."""

    points: tuple[tuple[float, float], ...]

    def at(self, batch: float) -> float:
        if len(self.points) == 1 or batch <= self.points[0][0]:
            return self.points[0][1]
        (left, low), (right, high) = next(((a, b) for a, b in pairwise(self.points) if batch <= b[0]), self.points[-2:])
        return low + (high - low) * (batch - left) / (right - left)


@dataclass(frozen=True)
class Costs:
    """Seconds of one engine."""

    step: Curve  # per step, by the frames it draws
    column: float  # per column of a prompt that has to be computed
    chunk: float  # per chunk that is decoded, however short,
    frame: float  # and per frame of it,
    together: Curve  # times this, by the voices that run: many are decoded in one call
    frame_rate: float  # frames per second of audio
    source: str = ""  # model and machine

    def of_step(self, frames: int, columns: int) -> float:
        return self.step.at(frames) + self.column * columns

    def of_decoding(self, chunks: int, frames: int, running: int) -> float:
        return (self.chunk * chunks + self.frame * frames) * self.together.at(running)


def read_costs(path: Path) -> Costs:
    """Raises InvalidRequest when the file is not a whole benchmark of the engine."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InvalidRequest(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    try:
        return fit(document)
    except (LookupError, TypeError, ZeroDivisionError):
        raise InvalidRequest(f"{path} is not what `shoal bench engine --json` writes, or not all of it") from None


def fit(document: dict[str, Any]) -> Costs:
    """Costs from the rows of continuous batching, and from first audio with a voice known and unknown."""
    rows = [row for row in document["throughput"] if row["policy"] == "continuous"]
    rows.sort(key=_running)
    first = document["first_audio"]
    saved = first["known"]["columns_saved"] - first["unknown"]["columns_saved"]
    column = max(0.0, first["unknown"]["seconds"] - first["known"]["seconds"]) / saved
    chunk, frame = _decoding(rows[0], _first_chunk(rows[0], first, column))
    return Costs(
        step=Curve(tuple((_running(row), _step_seconds(row)) for row in rows)),
        column=column,
        chunk=chunk,
        frame=frame,
        together=Curve(tuple((_running(row), row["codec_seconds"] / _apart(row, chunk, frame)) for row in rows)),
        frame_rate=rows[0]["frames"] / rows[0]["audio_seconds"],
        source=f"{document['model']} on {document['machine']['device']}",
    )


def chunks_of(frames: int, config: EngineConfig) -> list[int]:
    """How the engine cuts an utterance that is made faster than it is heard."""
    chunks: list[int] = []
    while (sent := sum(chunks)) < frames:
        chunks.append(min(next_chunk(sent, config), frames - sent))
    return chunks


def next_chunk(sent: int, config: EngineConfig) -> int:
    """Frames that make a chunk: few at first, then half of what has been sent."""
    return max(config.first_chunk_frames, min(sent // 2, config.max_chunk_frames))


def _first_chunk(row: dict[str, Any], first: dict[str, Any], column: float) -> float:
    """What the first chunk took to decode: what is left of first audio without the steps before it."""
    computed = first["prompt_columns"] - first["known"]["columns_saved"]
    steps = EngineConfig.first_chunk_frames * _step_seconds(row)
    return max(0.0, float(first["known"]["seconds"] - steps - column * computed))


def _decoding(row: dict[str, Any], first_chunk: float) -> tuple[float, float]:
    """Seconds per chunk and per frame, such that the first chunk and all of a voice alone take what they took."""
    size = row["frames"] / _chunks(row)
    mean, shortest = row["codec_seconds"] / _chunks(row), EngineConfig.first_chunk_frames
    if size <= shortest:
        return mean, 0.0
    frame = min(max(0.0, mean - first_chunk) / (size - shortest), mean / size)
    return mean - frame * size, frame


def _apart(row: dict[str, Any], chunk: float, frame: float) -> float:
    """Seconds that decoding would have taken chunk by chunk."""
    return float(chunk * _chunks(row) + frame * row["frames"])


def _chunks(row: dict[str, Any]) -> int:
    """Of all utterances of a row, as if they were of one length."""
    usual = round(row["frames"] / row["utterances"])
    return int(row["utterances"]) * len(chunks_of(usual, EngineConfig()))


def _running(row: dict[str, Any]) -> float:
    return float(row["frames"] / row["steps"])


def _step_seconds(row: dict[str, Any]) -> float:
    """All of a step but the decoding: the model and the host."""
    return float((row["seconds"] - row["codec_seconds"]) / row["steps"])
