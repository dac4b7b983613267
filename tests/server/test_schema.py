"""The server conforms to its OpenAPI document."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import Serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ELEVENLABS, DIALOGUE = "/v1/text-to-speech/{voice_id}", "/v1/text-to-dialogue"
EXAMPLES = 25  # requests per route and mode
SPEAKING = ("/v1/tts", "/v1/audio/speech", "/invocations", ELEVENLABS, f"{ELEVENLABS}/stream", DIALOGUE)
# Routes that parse the same body with the same code as another.
SAME_BODY = (
    *(f"{ELEVENLABS}/with-timestamps", f"{ELEVENLABS}/stream/with-timestamps"),
    *(f"{DIALOGUE}/stream", "/v1/voices/add"),
)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_responses_conform_to_the_openapi_document(server: Serving, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    looked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path in SAME_BODY:
            continue
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # no body to invalidate

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def look(case: schemathesis.Case) -> None:
            shorten(case)
            answer = case.call(timeout=240)
            # A form converts every value to text, which may be valid.
            strict = [] if case.media_type == "multipart/form-data" else [negative_data_rejection]
            case.validate_response(answer, checks=CHECKS + strict)

        look()
        looked += 1
    assert looked > 7


def shorten(case: schemathesis.Case) -> None:
    """Shorten texts: a long one takes time and tests nothing more."""
    frames = case.body.get("max_new_tokens", 100) if case.path in SPEAKING and isinstance(case.body, dict) else 0
    if frames is None or (isinstance(frames, int) and frames > 4):
        case.body["max_new_tokens"] = 4
