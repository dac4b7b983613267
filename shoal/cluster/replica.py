"""One replica: an engine in a supervised child process, and its statistics.

As under `shoal serve`, a dead engine process is restarted, and requests that have sent no audio are replayed. When the
replica itself dies, Ray starts another one and the frontend replays the requests.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from shoal.cluster.replica_stats import ReplicaStats, RequestOutcome, percentiles
from shoal.cluster.startup_gate import StartTicket
from shoal.engine.process.messages import ModelInfo
from shoal.engine.process.supervisor import Supervisor
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineStopped, ShoalError
from shoal.server.logging import LogFormat, set_up_logging
from shoal.speech import AudioChunk, Samples, SpeechRequest
from shoal.text.prompt import Codes

STATISTICS_SECONDS = 1.0
# After this time without a ready engine the health check fails and Ray replaces the replica.
LOST_SECONDS = 600.0


class Replica:
    """Ray Serve deployment class; one instance per replica."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, source: EngineSource, gate: DeploymentHandle, log_format: LogFormat = "json", log_level: str = "info"
    ) -> None:
        set_up_logging(log_format, log_level)
        context = serve.get_replica_context()
        self._id, self._rank = context.replica_tag, context.rank.rank
        self._stats = ReplicaStats()
        entry: StartTicket = await gate.enter.remote(self._rank)
        self._starts = entry.starts
        await asyncio.sleep(entry.wait)
        self._source, self._supervisor = source, Supervisor(source)
        await asyncio.to_thread(self._supervisor.start)
        self._last_ready = time.monotonic()

    async def model(self) -> tuple[EngineSource, ModelInfo]:
        """Return the source and the model information of this replica."""
        return self._source, self._supervisor.model_info

    async def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk | ShoalError, None]:
        """Yield chunks. A ShoalError is yielded instead of raised: Ray would wrap it in its own exception."""
        started, has_audio, outcome = time.monotonic(), False, RequestOutcome.CANCELLED
        self._stats.start_request()
        try:
            async with aclosing(self._supervisor.speak(request)) as chunks:
                async for chunk in chunks:
                    if not has_audio and len(chunk.samples):
                        has_audio = True
                        self._stats.record_first_audio(request, time.monotonic() - started)
                    if chunk.finish is not None:
                        outcome = RequestOutcome.COMPLETED
                    yield chunk
        except ShoalError as error:
            outcome = RequestOutcome.FAILED
            yield error
        finally:
            self._stats.end_request(time.monotonic() - started, outcome)

    async def encode(self, audio: bytes) -> Codes | ShoalError:
        try:
            return await self._supervisor.aencode(audio)
        except ShoalError as error:
            return error

    async def decode(self, codes: Codes) -> Samples | ShoalError:
        try:
            return await self._supervisor.adecode(codes)
        except ShoalError as error:
            return error

    async def report(self) -> dict[str, Any]:
        """Return this replica's entry of `/v1/workers`; engine statistics are left out if they time out."""
        stats, supervisor = self._stats, self._supervisor
        report: dict[str, Any] = {
            "id": self._id,
            "rank": self._rank,
            "node": socket.gethostname(),
            "gpus": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "pid": os.getpid(),
            "engine_pid": supervisor.process_id,
            "state": "ready" if supervisor.ready else "restarting",
            "requests": stats.requests,
            "failed": stats.failed,
            "cancelled": stats.cancelled,
            "in_flight": stats.in_flight,
            "restarts": self._starts - 1 + supervisor.restarts,
            "first_audio_seconds": percentiles(stats.first_audio),
            "speech_seconds": percentiles(stats.whole),
            "voices": list(reversed(stats.voices)),
            "model_info": _summary(supervisor.model_info),
        }
        with suppress(TimeoutError, ShoalError):
            async with asyncio.timeout(STATISTICS_SECONDS):
                report["engine"] = await asyncio.to_thread(supervisor.statistics)
                report["cached_voices"] = report["engine"]["voices"]["entries"]
        return report

    async def check_health(self) -> None:
        """Raise when the engine is lost; Ray then replaces the replica."""
        if self._supervisor.ready:
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > LOST_SECONDS:
            raise EngineStopped(f"the engine has not been ready for {LOST_SECONDS:g} s")

    async def __del__(self) -> None:
        """Close the engine; Ray calls this after the requests in flight have finished."""
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            await asyncio.to_thread(supervisor.close)


def _summary(info: ModelInfo) -> dict[str, Any]:
    backends = {"backend": info.backends.model, "codec_backend": info.backends.codec}
    return {"model": info.model, "device": info.device, **backends, "sample_rate": info.sample_rate}
