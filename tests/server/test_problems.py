import pkgutil
from importlib import import_module

import pytest

import shoal
from shoal import errors
from shoal.errors import ShoalError
from shoal.server.problems import STATUS, kind_of, problem, status_of
from shoal.server.refusals import QuotaExceeded, SchemaViolation, Unauthorized


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


def test_kinds_are_words_for_metrics() -> None:
    assert kind_of(errors.GenerationFailed()) == "generation_failed"
