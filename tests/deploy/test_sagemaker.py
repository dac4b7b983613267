"""The packed handler, called by SageMaker's own inference toolkit."""

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from sagemaker_inference.transformer import Transformer

from shoal.deploy.package import ARCHIVE, model_files, package_sagemaker
from tests.deploy.conftest import SAY
from tests.server.conftest import samples_of


class Context:
    """Request and response of the model server, as the toolkit sees them."""

    def __init__(self, model_dir: Path, content_type: str, accept: str) -> None:
        self.system_properties = {"model_dir": str(model_dir)}
        self.request_processor = [self]
        self._properties = {"Content-Type": content_type, "Accept": accept}
        self.content_type, self.status = "", 200

    def get_request_properties(self) -> dict[str, str]:
        return self._properties

    def set_response_content_type(self, request: int, value: str) -> None:
        self.content_type = value

    def set_response_status(self, code: int, phrase: str) -> None:
        self.status = code


class Toolkit:
    def __init__(self, model_dir: Path) -> None:
        self.transformer, self._model_dir = Transformer(), model_dir

    def __call__(self, body: bytes, content_type: str = "application/json", accept: str = "*/*") -> tuple[Context, Any]:
        context = Context(self._model_dir, content_type, accept)
        return context, self.transformer.transform([{"body": bytearray(body)}], context)[0]


@pytest.fixture(scope="module")
def toolkit(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolkit]:
    """Act as a container of SageMaker: the archive is unpacked, and the program in its `code` is called."""
    place = tmp_path_factory.mktemp("sagemaker")
    package_sagemaker(model_files(str(tiny_directory)), place / "out", lambda reported: None)
    with tarfile.open(place / "out" / ARCHIVE) as archive:
        archive.extractall(place / "model", filter="data")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place / "model" / "code"))
        patch.setenv("SAGEMAKER_PROGRAM", "inference.py")
        patch.setenv("SHOAL_GUARD", "false")
        patch.setenv("SHOAL_VOICES", str(place / "voices"))
        toolkit = Toolkit(place / "model")
        yield toolkit
        toolkit.transformer._model.close()
        sys.modules.pop("inference", None)


def test_a_body_of_fish_is_spoken(toolkit: Toolkit) -> None:
    context, audio = toolkit(json.dumps(SAY).encode())
    assert (context.status, context.content_type) == (200, "audio/wav")
    assert len(samples_of(audio)) > 1000


def test_a_body_of_openai_in_message_pack_is_spoken(toolkit: Toolkit) -> None:
    body = {"model": "tts-1", "input": "Hello.", "voice": "alloy", "response_format": "flac", "max_new_tokens": 20}
    context, audio = toolkit(ormsgpack.packb(body), "application/msgpack", "audio/flac")
    assert (context.status, context.content_type) == (200, "audio/flac")
    assert audio.startswith(b"fLaC")


@pytest.mark.parametrize(
    ("body", "content_type", "accept", "status", "reported"),
    [
        (b"no", "application/json", "*/*", 422, "not JSON"),
        (b'{"text": ""}', "application/json", "*/*", 422, "text"),
        (b'{"text": "a", "reference_id": "nobody"}', "application/json", "*/*", 404, "nobody"),
        (b"hello", "text/plain", "*/*", 415, "application/json"),
        (json.dumps(SAY).encode(), "application/json", "audio/mpeg", 400, "change `format`"),
    ],
)
def test_what_cannot_be_spoken_has_its_status(
    toolkit: Toolkit, body: bytes, content_type: str, accept: str, status: int, reported: str
) -> None:
    context, message = toolkit(body, content_type, accept)
    assert context.status == status
    assert reported in message.partition("\n")[0]
