"""A/B comparison: copies of a share of the speech requests go to a candidate, and both answers are measured.

Clients only get the worker's answer; the copy is sent when that is complete. The answers are compared pair by pair:
latency, failures, duration of the audio, and whether the audio passes the speech guard.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from shoal.audio.decode import AudioLimits, read_audio
from shoal.audio.guard import check_speech
from shoal.errors import ShoalError

logger = logging.getLogger(__name__)

RECENT_PAIRS = 512
MAX_COPIES = 4  # copies in flight; further ones are skipped, so that a slow candidate costs no memory
MAX_ANSWER_BYTES = 16 << 20  # longer answers are compared by their latency alone
COPY_SECONDS = 120.0
ANALYSIS_RATE = 16_000  # Hz
LIMITS = AudioLimits(max_bytes=MAX_ANSWER_BYTES, min_seconds=0.0, max_seconds=1200.0)


@dataclass(frozen=True, slots=True)
class CopiedRequest:
    """Copy of a request, to send it again."""

    method: str
    target: str  # path and query
    headers: list[tuple[bytes, bytes]]
    body: bytes
    text: str | None  # text of the request, if it is known


@dataclass(slots=True)
class Answer:
    """Measurements of one answer."""

    started: float = field(default_factory=time.monotonic)
    status: int = 0  # 0: no answer
    first_byte_seconds: float = math.nan
    total_seconds: float = math.nan
    size: int = 0
    content: list[bytes] = field(default_factory=list)
    audio_seconds: float = math.nan  # NaN: not decoded
    defects: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.status == 0 or self.status >= 500

    def add(self, chunk: bytes) -> None:
        if not self.size:
            self.first_byte_seconds = time.monotonic() - self.started
        self.size += len(chunk)
        if self.size <= MAX_ANSWER_BYTES:
            self.content.append(chunk)

    def end(self, status: int) -> None:
        self.status, self.total_seconds = status, time.monotonic() - self.started

    def judge(self, text: str | None) -> None:
        """Decode and check the audio. Blocks. Formats without a header (pcm) are not judged."""
        content, self.content = b"".join(self.content), []
        if self.status != 200 or not content or self.size > MAX_ANSWER_BYTES:
            return
        try:
            samples = read_audio(content, ANALYSIS_RATE, LIMITS).samples
        except ShoalError as problem:
            logger.debug("comparison: audio not decoded: %s", problem)
            return
        self.audio_seconds = len(samples) / ANALYSIS_RATE
        self.defects = tuple(defect.value for defect in check_speech(samples, ANALYSIS_RATE, text))


class Comparison:
    """Copies requests to the candidate at `url` and keeps the measurements of the latest pairs."""

    def __init__(self, url: str, share: float, client: httpx.AsyncClient) -> None:
        self.url, self.share, self._client = url, share, client
        self.pairs: deque[tuple[Answer, Answer]] = deque(maxlen=RECENT_PAIRS)
        self.skipped = 0  # because MAX_COPIES were in flight
        self._credit = 0.0
        self._copies: set[asyncio.Task[None]] = set()

    def selects(self) -> bool:
        """Return whether to copy a speech request: every 1/share-th, evenly spaced."""
        self._credit += self.share
        chosen = self._credit >= 1.0
        self._credit -= chosen
        return chosen

    async def observe(
        self, chunks: AsyncIterator[bytes], control: Answer, status: int, copied: CopiedRequest
    ) -> AsyncIterator[bytes]:
        """Yield the chunks of a worker's answer; once the client has received all of them, send the copy."""
        async for chunk in chunks:
            control.add(chunk)
            yield chunk
        control.end(status)
        if len(self._copies) >= MAX_COPIES:
            self.skipped += 1
            return
        task = asyncio.create_task(self._compare(copied, control))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def close(self) -> None:
        for task in list(self._copies):
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _compare(self, copied: CopiedRequest, control: Answer) -> None:
        candidate = await self._send(copied)
        for answer in (control, candidate):
            await asyncio.to_thread(answer.judge, copied.text)
        self.pairs.append((control, candidate))

    async def _send(self, copied: CopiedRequest) -> Answer:
        answer = Answer()
        request = self._client.build_request(
            copied.method, f"{self.url}{copied.target}", headers=copied.headers, content=copied.body
        )
        try:
            async with asyncio.timeout(COPY_SECONDS):
                response = await self._client.send(request, stream=True)
                try:
                    async for chunk in response.aiter_raw():
                        answer.add(chunk)
                finally:
                    await response.aclose()
            answer.end(response.status_code)
        except (httpx.TransportError, TimeoutError) as problem:
            logger.warning("comparison: the candidate did not answer: %s", type(problem).__name__)
        return answer

    def report(self) -> dict[str, Any]:
        """Return the measurements of both servers, and the differences within pairs."""
        controls, candidates = [pair[0] for pair in self.pairs], [pair[1] for pair in self.pairs]
        return {
            "candidate_url": self.url,
            "share": self.share,
            "pairs": len(self.pairs),
            "skipped": self.skipped,
            "control": _summary(controls),
            "candidate": _summary(candidates),
            "candidate_minus_control": {
                "first_byte_ms": self._difference(lambda answer: answer.first_byte_seconds * 1e3),
                "total_ms": self._difference(lambda answer: answer.total_seconds * 1e3),
                "audio_seconds": self._difference(lambda answer: answer.audio_seconds),
            },
        }

    def _difference(self, of: Callable[[Answer], float]) -> dict[str, float] | None:
        """Return the mean difference and its 95 % interval; None with fewer than two pairs that have both values."""
        found = np.array([of(candidate) - of(control) for control, candidate in self.pairs])
        found = found[np.isfinite(found)]
        if len(found) < 2:
            return None
        mean, margin = float(found.mean()), 1.96 * float(found.std(ddof=1)) / math.sqrt(len(found))
        return {"mean": round(mean, 3), "low": round(mean - margin, 3), "high": round(mean + margin, 3)}


def _summary(answers: list[Answer]) -> dict[str, Any]:
    judged = [answer for answer in answers if math.isfinite(answer.audio_seconds)]
    return {
        "failed": sum(answer.failed for answer in answers),
        "refused": sum(400 <= answer.status < 500 for answer in answers),
        "judged": len(judged),
        "not_speech": sum(bool(answer.defects) for answer in judged),
        "first_byte_ms": _percentiles([answer.first_byte_seconds for answer in answers]),
        "total_ms": _percentiles([answer.total_seconds for answer in answers]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    finite = [each for each in seconds if math.isfinite(each)]
    if not finite:
        return None
    low, high = np.percentile(np.array(finite) * 1e3, (50, 95))
    return {"p50": round(float(low), 1), "p95": round(float(high), 1)}
