import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.cluster.proxy_errors import middlewares

PLAIN_ERROR = PlainTextResponse("The actor died unexpectedly", 500)


async def no_response(scope: Scope, receive: Receive, send: Send) -> None:
    """Ray's proxy sends nothing when a frontend dies before its response; uvicorn then makes a plain-text 500."""


def get(app: ASGIApp, path: str) -> httpx.Response:
    (middleware,) = middlewares()
    transport = httpx.ASGITransport(middleware.cls(app))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://cluster") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("app", [no_response, PLAIN_ERROR, PlainTextResponse("unavailable", 503)])
@pytest.mark.parametrize(
    ("path", "keys"), [("/v1/tts", "statusCode"), ("/v1/audio/speech", "error"), ("/v1/text-to-speech/a", "detail")]
)
def test_errors_of_rays_proxy_have_the_format_of_the_api(app: ASGIApp, path: str, keys: str) -> None:
    answer = get(app, path)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert keys in answer.json()
    assert "actor" not in answer.text


def test_responses_of_the_application_pass_unchanged() -> None:
    ours = get(JSONResponse({"error": {"message": "internal server error"}}, 500), "/v1/audio/speech")
    assert (ours.status_code, ours.json()["error"]["message"]) == (500, "internal server error")
    assert get(PlainTextResponse("metrics"), "/metrics").text == "metrics"


def test_rays_own_paths_pass_unchanged() -> None:
    assert get(PLAIN_ERROR, "/-/healthz").text == "The actor died unexpectedly"
