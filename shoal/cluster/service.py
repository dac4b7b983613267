"""The replicas as one engine: what the server's routes call, and where a request finds another replica."""

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

# Replicas one request may be given to: one that kills them must not kill them all.
ATTEMPTS = 3
ANSWER_SECONDS = 60.0
REPORT_SECONDS = 5.0


class ClusterService:
    """The interface of `Service` across the cluster."""

    def __init__(self, replicas: DeploymentHandle, facts: ModelInfo) -> None:
        self._replicas, self._facts = replicas, facts
        self._speak = replicas.options(stream=True).speak

    # Whoever has no replica now waits for one; Ray holds the request.
    ready = True

    @property
    def default_sampling(self) -> SamplingParams:
        return self._facts.default_sampling

    @property
    def default_voice(self) -> str | None:
        return self._facts.default_voice

    @property
    def sample_rate(self) -> int:
        return self._facts.sample_rate

    async def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Chunks as they are made; leaving the generator cancels.

        When a replica is lost, a request of which nothing has been heard goes to another as if it had just come.
        """
        since = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            heard, at_our_rate = False, ChunkResampler(self.sample_rate)
            spoken = self._spoken(_remaining(request, since))
            try:
                async for chunk in spoken:
                    heard = True
                    yield at_our_rate(chunk)
                return
            except RayActorError:
                if heard or attempt == ATTEMPTS:
                    raise EngineStopped("the replica failed while it spoke; send the request again") from None
                logger.warning("a replica is gone; its request goes to another (%d)", attempt)
            finally:
                await spoken.aclose()

    async def _spoken(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """What one replica makes of it. Raises RayActorError when that is lost."""
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
            raise EngineBusy("all replicas are full; try again later") from None
        except (RayActorError, ShoalError):
            raise
        except (RayError, RayServeException) as problem:
            logger.exception("a replica failed")
            raise EngineStopped("the replica failed while it spoke; send the request again") from problem
        finally:
            if not ended:
                response.cancel()

    async def aencode(self, audio: bytes) -> Codes:
        codes: Codes = await self._ask("encode", audio)
        return codes

    async def adecode(self, codes: Codes) -> Samples:
        samples: Samples = await self._ask("decode", codes)
        return samples

    def statistics(self) -> dict[str, Any]:
        """The engines' figures together: what can be added is added."""
        total: dict[str, Any] = {}
        for report in self.reports():
            _add(total, {**report.get("engine", {}), "restarts": report["restarts"]})
        return total

    def reports(self) -> list[dict[str, Any]]:
        return gather(self._replicas)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """The replicas live on; Ray ends them."""

    async def _ask(self, method: str, given: object) -> Any:
        """Leaving cancels."""
        for _ in range(ATTEMPTS):
            try:
                answer = await self._answered(getattr(self._replicas, method).remote(given))
            except RayActorError:
                continue
            except TimeoutError:
                raise EngineStopped("no replica answered in time; try again") from None
            if isinstance(answer, ShoalError):
                raise answer
            return answer
        raise EngineStopped("the replicas failed over this request")

    async def _answered(self, response: DeploymentResponse) -> Any:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await response
        finally:
            response.cancel()  # nothing, if it has been answered


def gather(replicas: DeploymentHandle) -> list[dict[str, Any]]:
    """The report of every replica that answers, in the order of ranks. Blocks."""
    try:
        reports = replicas.broadcast("report").results(timeout_s=REPORT_SECONDS, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return sorted((each for each in reports if isinstance(each, dict)), key=lambda each: each["rank"])


def _remaining(request: SpeechRequest, since: float) -> SpeechRequest:
    if request.timeout is None:
        return request
    return replace(request, timeout=max(request.timeout - (time.monotonic() - since), 1e-3))


def _add(total: dict[str, Any], figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[name] = total.get(name, 0) + value
