"""`/`: the web page, static files of `shoal/ui`; `/docs`: the API reference, rendered by a bundled Swagger UI.

Neither needs a key, but the API calls that they make do.
"""

import gzip
import re
from functools import lru_cache
from pathlib import Path

import anyio
import fastapi_swagger
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parents[2] / "ui"
SWAGGER = Path(fastapi_swagger.__file__).parent / "resources"

# Same origin only, nothing inline. `blob:` is audio that the page created itself.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "media-src 'self' blob:",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    # Browsers revalidate by ETag, so that a page never mixes files of two versions.
    "Cache-Control": "no-cache",
}

# Swagger UI uses data: URLs for icons and inline styles.
DOCS_HEADERS = HEADERS | {
    "Content-Security-Policy": POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").replace(
        "img-src 'self'", "img-src 'self' data:"
    )
}

TEXT_SUFFIXES = {".html", ".css", ".js", ".svg", ".txt"}

router = APIRouter(include_in_schema=False)


class Assets(StaticFiles):
    """Files of one directory. Text is sent with gzip to clients that accept it, without `Range`."""

    def __init__(self, directory: Path, headers: dict[str, str] = HEADERS) -> None:
        super().__init__(directory=directory)
        self._headers = headers

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if Path(path).suffix in TEXT_SUFFIXES:
            response.headers["Vary"] = "Accept-Encoding"
            if isinstance(response, FileResponse):
                response = await self._compressed(response, Headers(scope=scope))
        response.headers.update(self._headers)
        return response

    async def _compressed(self, file: FileResponse, request: Headers) -> Response:
        """Return the file compressed, not modified, or as it is if the client asks for that."""
        if "range" in request or not accepts_gzip(request.get("accept-encoding", "")):
            return file
        headers = MutableHeaders(raw=list(file.raw_headers))
        headers["Content-Encoding"] = "gzip"
        # Another sequence of bytes needs another ETag, and ranges of it are not served.
        headers["ETag"] = f'{headers["etag"][:-1]}-gzip"'
        del headers["accept-ranges"]
        if self.is_not_modified(headers, request):
            return NotModifiedResponse(headers)
        del headers["content-length"]
        content = await anyio.to_thread.run_sync(gzipped, str(file.path), file.headers["etag"])
        return Response(content, headers=dict(headers))


@lru_cache(maxsize=256)
def gzipped(path: str, etag: str) -> bytes:
    """Return the content of a file, compressed once per version of the file. Thread-safe."""
    return gzip.compress(Path(path).read_bytes(), mtime=0)


def accepts_gzip(header: str) -> bool:
    """Return whether an Accept-Encoding header names gzip, with a weight that is not zero."""
    codings = (coding.replace(" ", "").lower().partition(";") for coding in header.split(","))
    return any(name == "gzip" and not re.fullmatch(r"q=0(\.0*)?", weight) for name, _, weight in codings)


INDEX = Assets(PAGE)
DOCS = Assets(PAGE, DOCS_HEADERS)


def add_routes(app: FastAPI) -> None:
    app.include_router(router)
    app.mount("/assets", Assets(PAGE / "assets"), name="assets")
    app.mount("/swagger", Assets(SWAGGER), name="swagger")


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    return await INDEX.get_response("index.html", request.scope)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    return await DOCS.get_response("docs.html", request.scope)


@router.get("/ui")
async def fish_speech_path() -> RedirectResponse:
    return RedirectResponse("./")
