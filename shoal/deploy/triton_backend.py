"""A model of Triton's Python backend: requests in, pieces of audio out while they are made.

`execute` takes what Triton has and returns at once, so that requests meet in our engine, which batches them frame by
frame. Responses are decoupled: as many per request as there are pieces, and a last one that is empty.
"""

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # only there inside Triton

from shoal.api.exceptions import wrong_field
from shoal.api.parsing import parse_json
from shoal.deploy.worker import EventLoopThread, close_worker, open_worker, speech_stream
from shoal.errors import ShoalError
from shoal.settings import read_settings

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Parameters of config.pbtxt are settings; without a `model` it is the one that was packed.

        Those in capitals are Triton's own, such as EXECUTION_ENV_PATH.
        """
        parameters = json.loads(args["model_config"]).get("parameters", {})
        flags = {name: value["string_value"] for name, value in parameters.items() if not name.isupper()}
        packed = Path(args["model_repository"], args["model_version"], CHECKPOINT)
        self._state = open_worker(read_settings({"model": str(packed), **flags}).settings)
        self._thread = EventLoopThread()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._thread.begin(self._answer(request, request.get_response_sender()))

    def finalize(self) -> None:
        self._thread.close()
        close_worker(self._state)

    async def _answer(self, request: Any, sender: Any) -> None:
        """The edge: whatever happens, Triton is told that this request has ended."""
        try:
            await self._speak(request, sender)
        except ShoalError as problem:
            sender.send(failure(str(problem)))
        except Exception:
            logger.exception("a request ended in a bug")
            sender.send(failure("this is a fault of the server; its log has more"))
        finally:
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _speak(self, request: Any, sender: Any) -> None:
        id = request.request_id() or uuid.uuid4().hex
        async with speech_stream(self._state, content_of(request), id) as (job, stream):
            rate = job.output.rate_for(job.engine.service.sample_rate)
            async for piece in stream.buffer.read():
                if sender.is_cancelled():
                    return
                sender.send(response(piece, job.output.media_type, rate))


def content_of(request: Any) -> Any:
    """The JSON of the one input. Raises SchemaViolation."""
    given = triton.get_input_tensor_by_name(request, "request").as_numpy().reshape(-1)
    if given.size != 1:
        raise wrong_field("request", "give one JSON text")
    return parse_json(given[0])


def response(piece: bytes, media_type: str, rate: int) -> Any:
    return triton.InferenceResponse(
        [
            triton.Tensor("audio", np.frombuffer(piece, np.uint8)),
            triton.Tensor("media_type", np.array([media_type.encode()], np.object_)),
            triton.Tensor("sample_rate", np.array([rate], np.int32)),
        ]
    )


def failure(message: str) -> Any:
    return triton.InferenceResponse([], error=triton.TritonError(message))
