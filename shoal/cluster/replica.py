"""One replica: an engine in a process of its own, and what there is to tell about it.

The engine's process is watched as under `shoal serve`: when it dies, the replica starts it again and requests that have
sent no audio are replayed. When the replica itself dies, Ray starts another and the front does the replaying.
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
# An engine that has not come back in this time will not: the replica gives up, and Ray starts one elsewhere.
LOST_SECONDS = 600.0


class Replica:
    """Ray Serve makes as many of these as there shall be."""

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
        """What runs here, and what there is to know of it."""
        return self._source, self._supervisor.model_info

    async def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk | ShoalError, None]:
        """Chunks, or in their place the error. It is sent, not raised: raised errors come out of Ray as its own."""
        began, heard, how = time.monotonic(), False, RequestOutcome.CANCELLED
        self._stats.start_request()
        try:
            async with aclosing(self._supervisor.speak(request)) as chunks:
                async for chunk in chunks:
                    if not heard and len(chunk.samples):
                        heard = True
                        self._stats.record_first_audio(request, time.monotonic() - began)
                    if chunk.finish is not None:
                        how = RequestOutcome.COMPLETED
                    yield chunk
        except ShoalError as error:
            how = RequestOutcome.FAILED
            yield error
        finally:
            self._stats.end_request(time.monotonic() - began, how)

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
        """This replica for `/v1/workers`; figures that the engine does not tell in time are left out."""
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
            "left": stats.cancelled,
            "in_flight": stats.in_flight,
            "restarts": self._starts - 1 + supervisor.restarts,
            "first_audio_seconds": percentiles(stats.first_audio),
            "speech_seconds": percentiles(stats.whole),
            "voices": list(reversed(stats.voices)),
            "facts": _plain(supervisor.model_info),
        }
        with suppress(TimeoutError, ShoalError):
            async with asyncio.timeout(STATISTICS_SECONDS):
                report["engine"] = await asyncio.to_thread(supervisor.statistics)
                report["cached_voices"] = report["engine"]["voices"]["entries"]
        return report

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that raises here."""
        if self._supervisor.ready:
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > LOST_SECONDS:
            raise EngineStopped(f"the engine has not been ready for {LOST_SECONDS:g} s")

    async def __del__(self) -> None:
        """Called by Ray when this replica has spoken what it had."""
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            await asyncio.to_thread(supervisor.close)


def _plain(facts: ModelInfo) -> dict[str, Any]:
    return {"model": facts.model, "device": facts.device, "rung": facts.backend, "sample_rate": facts.sample_rate}
