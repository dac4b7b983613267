"""`/`: the web page, static files of `shoal/ui`. It is open to all; what it asks the API for needs a key as ever."""

from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parents[1] / "ui"

# Nothing from elsewhere, nothing inline. `blob:` is audio that the page has made itself.
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
    # Asked for again by its ETag, so that no page mixes the files of two versions.
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


class Assets(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_to(app: FastAPI) -> None:
    app.include_router(router)
    app.mount("/assets", Assets(directory=PAGE / "assets"), name="assets")


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html", headers=HEADERS)


@router.get("/ui")
async def where_fish_speech_has_it() -> RedirectResponse:
    return RedirectResponse("./")
