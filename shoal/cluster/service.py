"""Engine client across all replicas: routes requests and retries them on another replica after a failure."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from shoal.cluster.resample import ChunkResampler
from shoal.engine.process.messages import ModelInfo
from shoal.errors import EngineBusy, EngineStopped, ShoalError
from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes

logger = logging.getLogger(__name__)

# Maximum replicas per request: a request that crashes its replica must not crash all of them.
ATTEMPTS = 3
ANSWER_SECONDS = 60.0
REPORT_SECONDS = 5.0


class ClusterService:
    """Implements the interface of the engine service on top of Ray Serve."""

    def __init__(self, replicas: DeploymentHandle, model_info: ModelInfo) -> None:
        self._replicas, self._model_info = replicas, model_info
        self._speak = replicas.options(stream=True).speak
        # True while a replica runs. Requests are accepted either way: Ray queues them until one runs.
        self.ready = True

    @property
    def default_sampling(self) -> SamplingParams:
        return self._model_info.default_sampling

    @property
    def default_voice(self) -> str | None:
        return self._model_info.default_voice

    @property
    def sample_rate(self) -> int:
        return self._model_info.sample_rate

    async def speak(self, request: SpeechRequest, deadline: float | None = None) -> AsyncGenerator[AudioChunk, None]:
        """Yield chunks as they are generated; closing the generator cancels the request.

        If its replica is lost, a request that has sent no audio is retried on another replica. Raises ShoalError.
        `deadline` is absolute, in `time.monotonic()` seconds; without it the request's timeout starts now.
        """
        deadline = request.deadline_from(time.monotonic()) if deadline is None else deadline
        for attempt in range(1, ATTEMPTS + 1):
            has_audio, resample = False, ChunkResampler(self.sample_rate)
            chunks = self._stream(_with_remaining_timeout(request, deadline))
            try:
                async for chunk in chunks:
                    has_audio = True
                    yield resample(chunk)
                return
            except RayActorError:
                if has_audio or attempt == ATTEMPTS:
                    raise EngineStopped("the replica failed during generation; send the request again") from None
                logger.warning("replica lost: retrying the request on another replica (attempt %d)", attempt)
            finally:
                await chunks.aclose()

    async def _stream(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Yield the chunks of one replica. Raises RayActorError when the replica is lost."""
        response, ended = self._speak.remote(request), False
        try:
            async for reply in response:
                if isinstance(reply, ShoalError):
                    ended = True
                    raise reply
                ended = reply.finish is not None
                yield reply
            ended = True
        except BackPressureError:
            raise EngineBusy("the queues of all replicas are full; try again later") from None
        except (RayActorError, ShoalError):
            raise
        except (RayError, RayServeException) as problem:
            logger.exception("replica failed during a request")
            raise EngineStopped("the replica failed during generation; send the request again") from problem
        finally:
            if not ended:
                response.cancel()

    async def aencode(self, audio: bytes) -> Codes:
        codes: Codes = await self._call("encode", audio)
        return codes

    async def adecode(self, codes: Codes) -> Samples:
        samples: Samples = await self._call("decode", codes)
        return samples

    def statistics(self) -> dict[str, Any]:
        """Return the sum of all engines' statistics."""
        total: dict[str, Any] = {}
        for report in self.reports():
            _add(total, {**report.get("engine", {}), "restarts": report["restarts"]})
        return total

    def reports(self) -> list[dict[str, Any]]:
        return gather(self._replicas)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Do nothing: Ray owns the replicas."""

    async def _call(self, method: str, given: object) -> Any:
        """Call a method on any replica, with retries; cancelling the task cancels the call."""
        for _ in range(ATTEMPTS):
            try:
                answer = await self._result(getattr(self._replicas, method).remote(given))
            except RayActorError:
                continue
            except TimeoutError:
                raise EngineStopped(f"no replica responded within {ANSWER_SECONDS:g} s; try again") from None
            if isinstance(answer, ShoalError):
                raise answer
            return answer
        raise EngineStopped(f"{ATTEMPTS} replicas failed during this request")

    async def _result(self, response: DeploymentResponse) -> Any:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await response
        finally:
            response.cancel()  # no effect on a completed call


def gather(replicas: DeploymentHandle) -> list[dict[str, Any]]:
    """Return the reports of all replicas that respond, ordered by rank. Blocks."""
    try:
        reports = replicas.broadcast("report").results(timeout_s=REPORT_SECONDS, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return sorted((each for each in reports if isinstance(each, dict)), key=lambda each: each["rank"])


def _with_remaining_timeout(request: SpeechRequest, deadline: float | None) -> SpeechRequest:
    """Set the timeout to the time until the deadline: machines do not share a monotonic clock."""
    return request if deadline is None else replace(request, timeout=max(deadline - time.monotonic(), 1e-3))


def _add(total: dict[str, Any], figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[name] = total.get(name, 0) + value
