"""Handler functions of SageMaker's inference toolkit, for SageMaker's own containers.

Such a container sends one request at a time. The Shoal image serves `/invocations` itself and batches requests.
"""

import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shoal.api.bodies.parsing import ALL, JSON, MSGPACK, MSGPACK_NAMES, parse_json, unpack
from shoal.api.exceptions import UnknownMediaType
from shoal.api.state import ServerState
from shoal.deploy.worker import EventLoopThread, close_worker, open_worker, speech_stream
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.error_responses import status_of
from shoal.settings import read_settings

# Accept values of clients that do not choose a format.
ANYTHING = ("", "*/*", "audio/*", "application/octet-stream", JSON)


@dataclass(frozen=True)
class SageMakerModel:
    state: ServerState
    thread: EventLoopThread

    def close(self) -> None:
        self.thread.close()
        close_worker(self.state)


@dataclass(frozen=True)
class EncodedAudio:
    content: bytes
    media_type: str


def model_fn(model_dir: str) -> SageMakerModel:
    """Load a model packaged by `shoal package sagemaker`. Other settings are `SHOAL_…` variables."""
    return SageMakerModel(open_worker(read_settings({"model": model_dir}).settings), EventLoopThread())


def input_fn(body: bytearray | bytes | str, content_type: str) -> Any:
    media_type = content_type.split(";")[0].strip().lower()
    try:
        if media_type == JSON:
            return parse_json(body if isinstance(body, str) else bytes(body))
        if media_type in MSGPACK_NAMES and not isinstance(body, str):
            return unpack(bytes(body))
        raise UnknownMediaType(f"send {JSON} or {MSGPACK}, not {media_type or 'nothing'}", ALL)
    except ShoalError as problem:
        raise toolkit_error(problem) from problem


def predict_fn(content: Any, model: SageMakerModel) -> EncodedAudio:
    try:
        return model.thread.wait(_speak(model.state, content))
    except ShoalError as problem:
        raise toolkit_error(problem) from problem


def output_fn(audio: EncodedAudio, accept: str) -> tuple[bytes, str]:
    wanted = accept.split(";")[0].strip().lower()
    if wanted not in (*ANYTHING, audio.media_type):
        raise toolkit_error(
            InvalidRequest(f"the body sets {audio.media_type}, Accept is {wanted[:64]}: change `format`")
        )
    return audio.content, audio.media_type


def toolkit_error(problem: ShoalError) -> Exception:
    """Convert to the toolkit's error, which carries the HTTP status; without the toolkit, return the error itself."""
    try:
        from sagemaker_inference.errors import GenericInferenceToolkitError
    except ModuleNotFoundError:
        return problem
    status = status_of(problem)
    error: Exception = GenericInferenceToolkitError(status, str(problem), HTTPStatus(status).phrase)
    return error


async def _speak(state: ServerState, content: Any) -> EncodedAudio:
    async with speech_stream(state, content, uuid.uuid4().hex) as (job, stream):
        return EncodedAudio(await stream.read_all(), job.output.media_type)
