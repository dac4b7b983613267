import asyncio
import pkgutil
from importlib import import_module

import httpx
import pytest
from starlette.types import Receive, Scope, Send

import shoal
from shoal import errors
from shoal.api.exceptions import QuotaExceeded, SchemaViolation, Unauthorized
from shoal.errors import ShoalError
from shoal.metrics import Metrics
from shoal.server.error_responses import STATUS, LastAnswer, kind_of, problem, status_of
from shoal.server.middleware.origins import Origins
from shoal.server.middleware.request_id import Identity


def all_errors() -> set[type[ShoalError]]:
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.endswith("__main__"):
            _import_if_its_surroundings_are_here(module.name)
    found, left = set[type[ShoalError]](), [ShoalError]
    while left:
        found.add(each := left.pop())
        left += each.__subclasses__()
    return {each for each in found if each.__module__.startswith("shoal.")}


def _import_if_its_surroundings_are_here(name: str) -> None:
    """Some modules only run inside a host, such as Triton's server, that brings a module of its own."""
    try:
        import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("shoal"):
            raise


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # of Ray, which the cluster imports
def test_every_error_of_the_tree_has_a_status() -> None:
    assert {each.__name__ for each in all_errors() - set(STATUS)} == set()


def test_a_bug_is_a_500() -> None:
    assert status_of(ZeroDivisionError()) == 500


def test_fish_and_openai_get_their_own_shapes() -> None:
    error = errors.VoiceNotFound("There is no voice 'x'.")
    fish, openai = problem("/v1/tts", error), problem("/v1/audio/speech", error)
    assert fish.status_code == openai.status_code == 404
    assert bytes(fish.body) == b'{"statusCode":404,"message":"There is no voice \'x\'.","error":"Not Found"}'
    assert b'"code":"voice_not_found"' in bytes(openai.body)
    assert b'"type":"invalid_request_error"' in bytes(openai.body)


def test_a_schema_violation_is_a_bare_array_for_fish() -> None:
    finding = {"type": "missing", "loc": ["text"], "msg": "Field required"}
    assert bytes(problem("/v1/tts", SchemaViolation([finding])).body).startswith(b'[{"type":"missing"')
    assert b'"param":"text"' in bytes(problem("/v1/audio/speech", SchemaViolation([finding])).body)


@pytest.mark.parametrize(
    ("error", "header", "value"),
    [
        (errors.EngineBusy("full"), "retry-after", "8"),
        (errors.EngineStopped("gone"), "retry-after", "5"),
        (QuotaExceeded("done for today", 3600.4), "retry-after", "3601"),
        (Unauthorized("no key"), "www-authenticate", "Bearer"),
    ],
)
def test_headers_say_what_to_do(error: ShoalError, header: str, value: str) -> None:
    assert problem("/v1/tts", error, backlog_seconds=7.5).headers[header] == value


def test_a_bug_tells_nothing_of_itself() -> None:
    assert b"secret" not in bytes(problem("/v1/tts", RuntimeError("secret path")).body)


PAGE = "https://app.example"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/late":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("secret path")


def ask(path: str) -> httpx.Response:
    app = Identity(Origins(LastAnswer(broken), (PAGE,)), Metrics(lambda: None))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            return await http.get(path, headers={"origin": PAGE, "x-request-id": "find-me"})

    return asyncio.run(get())


def test_a_bug_is_answered_with_the_id_to_pages_that_may_read_it(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask("/v1/tts")
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "find-me")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "secret path" in caplog.text


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    with pytest.raises(RuntimeError):
        ask("/late")


def test_kinds_are_words_for_metrics() -> None:
    assert kind_of(errors.GenerationFailed()) == "generation_failed"
