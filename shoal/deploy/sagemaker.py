"""The four functions that SageMaker's inference toolkit calls, for its own containers.

Such a container asks for one request at a time. Our own image batches: it serves `/invocations` itself.
"""

import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shoal.api.exceptions import UnknownMediaType
from shoal.api.parsing import ALL, JSON, MSGPACK, MSGPACK_NAMES, parse_json, unpack
from shoal.api.state import ServerState
from shoal.deploy.worker import EventLoopThread, close_worker, open_worker, speech_stream
from shoal.errors import InvalidRequest, ShoalError
from shoal.server.error_responses import status_of
from shoal.settings import read_settings

# What clients send as Accept who do not choose, or whose library chooses for them.
ANYTHING = ("", "*/*", "audio/*", "application/octet-stream", JSON)


@dataclass(frozen=True)
class Model:
    state: ServerState
    thread: EventLoopThread

    def close(self) -> None:
        self.thread.close()
        close_worker(self.state)


@dataclass(frozen=True)
class Audio:
    content: bytes
    media_type: str


def model_fn(model_dir: str) -> Model:
    """Load the model that `shoal package sagemaker` packed. Other settings come as `SHOAL_…` variables."""
    return Model(open_worker(read_settings({"model": model_dir}).settings), EventLoopThread())


def input_fn(body: bytearray | bytes | str, content_type: str) -> Any:
    kind = content_type.split(";")[0].strip().lower()
    try:
        if kind == JSON:
            return parse_json(body if isinstance(body, str) else bytes(body))
        if kind in MSGPACK_NAMES and not isinstance(body, str):
            return unpack(bytes(body))
        raise UnknownMediaType(f"send {JSON} or {MSGPACK}, not {kind or 'nothing'}", ALL)
    except ShoalError as problem:
        raise told(problem) from problem


def predict_fn(content: Any, model: Model) -> Audio:
    try:
        return model.thread.wait(_whole(model.state, content))
    except ShoalError as problem:
        raise told(problem) from problem


def output_fn(audio: Audio, accept: str) -> tuple[bytes, str]:
    wanted = accept.split(";")[0].strip().lower()
    if wanted not in (*ANYTHING, audio.media_type):
        raise told(InvalidRequest(f"the body asks for {audio.media_type} and Accept for {wanted[:64]}: set `format`"))
    return audio.content, audio.media_type


def told(problem: ShoalError) -> Exception:
    """The error as the toolkit wants it, so that the client gets its status; without the toolkit, itself."""
    try:
        from sagemaker_inference.errors import GenericInferenceToolkitError
    except ModuleNotFoundError:
        return problem
    status = status_of(problem)
    error: Exception = GenericInferenceToolkitError(status, str(problem), HTTPStatus(status).phrase)
    return error


async def _whole(state: ServerState, content: Any) -> Audio:
    async with speech_stream(state, content, uuid.uuid4().hex) as (job, stream):
        return Audio(await stream.read_all(), job.output.media_type)
