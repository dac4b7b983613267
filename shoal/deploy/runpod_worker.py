"""RunPod serverless worker that streams audio while it is generated."""

import base64
from collections.abc import AsyncGenerator, Callable
from typing import Any

from shoal.api.state import ServerState
from shoal.deploy.worker import open_worker, speech_stream
from shoal.errors import MissingExtra, ShoalError
from shoal.settings import read_settings

Handler = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any], None]]


def main() -> None:
    """Process jobs until the platform stops the worker. Settings are `SHOAL_…` variables."""
    try:
        import runpod
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"a RunPod worker needs {missing.name}: pip install 'shoal-tts[runpod]'") from None
    settings = read_settings().settings
    handler = handler_for(open_worker(settings))
    # One concurrent job per slot: the engine runs them in one batch.
    concurrency = settings.slots
    runpod.serverless.start(
        {"handler": handler, "return_aggregate_stream": True, "concurrency_modifier": lambda current: concurrency}
    )


def handler_for(state: ServerState) -> Handler:
    async def handler(job: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield encoded audio in base64. RunPod ends a job that yields an `error`."""
        try:
            async with speech_stream(state, job.get("input"), str(job["id"])) as (speech_job, stream):
                media_type = speech_job.output.media_type
                rate = speech_job.output.rate_for(speech_job.engine.service.sample_rate)
                async for piece in stream.buffer.read():
                    yield {"audio": base64.b64encode(piece).decode(), "media_type": media_type, "sample_rate": rate}
        except ShoalError as problem:
            yield {"error": str(problem)}

    return handler


if __name__ == "__main__":
    main()
