"""Whatever the OpenAPI document allows or forbids, the server keeps to it."""

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
SPEAKING = ("/v1/tts", "/v1/audio/speech", "/invocations")


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_answer_breaks_the_document(server: Serving, mode: GenerationMode) -> None:
    look_at_all(server, mode, examples=6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_answer_breaks_the_document_in_a_long_look(server: Serving, mode: GenerationMode) -> None:
    look_at_all(server, mode, examples=100)


def look_at_all(server: Serving, mode: GenerationMode, examples: int) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    looked = 0
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing to get wrong

        @settings(
            max_examples=examples,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def look(case: schemathesis.Case) -> None:
            shorten(case)
            answer = case.call(timeout=30)
            # A form turns whatever it is given into text, which may be right after all.
            strict = [] if case.media_type == "multipart/form-data" else [negative_data_rejection]
            case.validate_response(answer, checks=CHECKS + strict)

        look()
        looked += 1
    assert looked > 7


def shorten(case: schemathesis.Case) -> None:
    """The longest speech a schema allows is no better test than a short one."""
    frames = case.body.get("max_new_tokens", 100) if case.path in SPEAKING and isinstance(case.body, dict) else 0
    if frames is None or (isinstance(frames, int) and frames > 4):
        case.body["max_new_tokens"] = 4
