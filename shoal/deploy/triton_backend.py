"""Model of Triton's Python backend that streams audio while it is generated.

`execute` submits requests and returns immediately, so that the engine can batch them. In decoupled mode, the default of
config.pbtxt, every piece of encoded audio is a response, followed by an empty final one. Otherwise there is exactly one
response with all of the audio, also asynchronous (Triton 24.06 or newer): Triton's HTTP interface and SageMaker's
multi-model endpoints support only such models.
"""

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # exists only inside Triton

from shoal.api.bodies.parsing import parse_json
from shoal.api.exceptions import wrong_field
from shoal.deploy.worker import EventLoopThread, close_worker, open_worker, speech_stream
from shoal.errors import ShoalError
from shoal.settings import read_settings

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Parameters in config.pbtxt are settings; the default `model` is the packaged one.

        Parameters in capitals are Triton's own, such as EXECUTION_ENV_PATH.
        """
        config = json.loads(args["model_config"])
        parameters = config.get("parameters", {})
        flags = {name: value["string_value"] for name, value in parameters.items() if not name.isupper()}
        packed = Path(args["model_repository"], args["model_version"], CHECKPOINT)
        self._decoupled = is_decoupled(config)
        self._state = open_worker(read_settings({"model": str(packed), **flags}).settings)
        self._thread = EventLoopThread()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._thread.submit(self._respond(request, request.get_response_sender()))

    def finalize(self) -> None:
        self._thread.close()
        close_worker(self._state)

    async def _respond(self, request: Any, sender: Any) -> None:
        """Run one request and always send the final response, without which Triton would wait forever."""
        try:
            await self._speak(request, sender)
        except ShoalError as problem:
            sender.send(failure(str(problem)))
        except Exception:  # edge to Triton: an unexpected error ends this request only
            logger.exception("request failed with an internal error")
            sender.send(failure("internal server error; see the server log"))
        finally:
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _speak(self, request: Any, sender: Any) -> None:
        id = request.request_id() or uuid.uuid4().hex
        async with speech_stream(self._state, content_of(request), id) as (job, stream):
            rate = job.output.rate_for(job.engine.service.sample_rate)
            pieces: list[bytes] = []
            async for piece in stream.buffer.read():
                if sender.is_cancelled():
                    return
                if self._decoupled:
                    sender.send(response(piece, job.output.media_type, rate))
                else:
                    pieces.append(piece)
            if not self._decoupled:
                sender.send(response(b"".join(pieces), job.output.media_type, rate))


def is_decoupled(config: dict[str, Any]) -> bool:
    """Return whether a model configuration lets a request have several responses."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


def content_of(request: Any) -> Any:
    """Parse the JSON of the input tensor. Raises SchemaViolation."""
    values = triton.get_input_tensor_by_name(request, "request").as_numpy().reshape(-1)
    if values.size != 1:
        raise wrong_field("request", "give one JSON text")
    return parse_json(values[0])


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
