"""The server conforms to its OpenAPI document.

Only this file needs schemathesis, which takes most of a CPU second to import. The worker that runs the tests does so,
and pyproject.toml keeps pytest from loading its plugin into every process.
"""

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.conftest import Serving

if TYPE_CHECKING:
    import schemathesis

ELEVENLABS, DIALOGUE = "/v1/text-to-speech/{voice_id}", "/v1/text-to-dialogue"
EXAMPLES = 15  # requests per route and mode
SPEAKING = ("/v1/tts", "/v1/audio/speech", "/invocations", ELEVENLABS, f"{ELEVENLABS}/stream", DIALOGUE)
# Routes that parse the same body with the same code as another.
SAME_BODY = (
    *(f"{ELEVENLABS}/with-timestamps", f"{ELEVENLABS}/stream/with-timestamps"),
    *(f"{DIALOGUE}/stream", "/v1/voices/add"),
)


def checks(*, negative: bool) -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as openapi

    found = [not_a_server_error, openapi.status_code_conformance, openapi.content_type_conformance]
    return [*found, openapi.response_schema_conformance, *([openapi.negative_data_rejection] if negative else [])]


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_responses_conform_to_the_openapi_document(server: Serving, mode: str) -> None:
    import schemathesis

    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    looked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path in SAME_BODY:
            continue
        if mode == "negative" and not operation.body:
            continue  # no body to invalidate

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def look(case: schemathesis.Case) -> None:
            shorten(case)
            answer = case.call(timeout=240)
            # A form converts every value to text, which may be valid.
            case.validate_response(answer, checks=checks(negative=case.media_type != "multipart/form-data"))

        look()
        looked += 1
    assert looked > 7


def shorten(case: "schemathesis.Case") -> None:
    """Shorten texts: a long one takes time and tests nothing more."""
    frames = case.body.get("max_new_tokens", 100) if case.path in SPEAKING and isinstance(case.body, dict) else 0
    if frames is None or (isinstance(frames, int) and frames > 4):
        case.body["max_new_tokens"] = 4
