import asyncio
import pkgutil
from importlib import import_module

import httpx
import pytest
from starlette.types import Receive, Scope, Send

import shoal
from shoal import errors
from shoal.api.exceptions import QuotaExceeded, SchemaViolation, Unauthorized, error_code
from shoal.errors import ShoalError
from shoal.metrics import Metrics
from shoal.server.error_responses import STATUS, error_response, status_of
from shoal.server.middleware.errors import ErrorMiddleware
from shoal.server.middleware.origins import OriginMiddleware
from shoal.server.middleware.request_id import RequestIDMiddleware


def all_errors() -> set[type[ShoalError]]:
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.endswith("__main__"):
            _import_if_its_host_is_installed(module.name)
    found, left = set[type[ShoalError]](), [ShoalError]
    while left:
        found.add(each := left.pop())
        left += each.__subclasses__()
    return {each for each in found if each.__module__.startswith("shoal.")}


def _import_if_its_host_is_installed(name: str) -> None:
    """Skip modules that need a host's own module, such as Triton's."""
    try:
        import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("shoal"):
            raise


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # raised by Ray
def test_every_error_class_has_a_status() -> None:
    assert {each.__name__ for each in all_errors() - set(STATUS)} == set()


def test_an_unexpected_exception_is_a_500() -> None:
    assert status_of(ZeroDivisionError()) == 500


def test_fish_and_openai_have_their_own_error_formats() -> None:
    error = errors.VoiceNotFound("There is no voice 'x'.")
    fish, openai = error_response("/v1/tts", error), error_response("/v1/audio/speech", error)
    assert fish.status_code == openai.status_code == 404
    assert bytes(fish.body) == b'{"statusCode":404,"message":"There is no voice \'x\'.","error":"Not Found"}'
    assert b'"code":"voice_not_found"' in bytes(openai.body)
    assert b'"type":"invalid_request_error"' in bytes(openai.body)


def test_a_schema_violation_is_a_bare_array_for_fish() -> None:
    problem = {"type": "missing", "loc": ["text"], "msg": "Field required"}
    assert bytes(error_response("/v1/tts", SchemaViolation([problem])).body).startswith(b'[{"type":"missing"')
    assert b'"param":"text"' in bytes(error_response("/v1/audio/speech", SchemaViolation([problem])).body)


@pytest.mark.parametrize(
    ("error", "header", "value"),
    [
        (errors.EngineBusy("full"), "retry-after", "8"),
        (errors.EngineStopped("gone"), "retry-after", "5"),
        (QuotaExceeded("done for today", 3600.4), "retry-after", "3601"),
        (Unauthorized("no key"), "www-authenticate", "Bearer"),
    ],
)
def test_headers_tell_the_client_what_to_do(error: ShoalError, header: str, value: str) -> None:
    assert error_response("/v1/tts", error, retry_after=7.5).headers[header] == value


def test_a_500_reveals_nothing_about_its_cause() -> None:
    assert b"secret" not in bytes(error_response("/v1/tts", RuntimeError("secret path")).body)


PAGE = "https://app.example"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/late":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("secret path")


def ask(path: str) -> httpx.Response:
    app = RequestIDMiddleware(OriginMiddleware(ErrorMiddleware(broken), (PAGE,)), Metrics(lambda: None))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.get(path, headers={"origin": PAGE, "x-request-id": "find-me"})

    return asyncio.run(get())


def test_a_500_has_the_request_id_and_is_readable_by_permitted_pages(caplog: pytest.LogCaptureFixture) -> None:
    response = ask("/v1/tts")
    assert (response.status_code, response.headers["x-request-id"]) == (500, "find-me")
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "secret path" in caplog.text


def test_a_response_that_has_started_is_not_started_again() -> None:
    with pytest.raises(RuntimeError):
        ask("/late")


def test_error_codes_are_snake_case_class_names() -> None:
    assert error_code(errors.GenerationFailed()) == "generation_failed"
