"""`/`: the web page, static files of `shoal/ui`; `/docs`: the API reference, rendered by a bundled Swagger UI.

Neither needs a key, but the API calls that they make do.
"""

from pathlib import Path

import fastapi_swagger
from fastapi import APIRouter, FastAPI
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
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

router = APIRouter(include_in_schema=False)


class Assets(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_routes(app: FastAPI) -> None:
    app.include_router(router)
    app.mount("/assets", Assets(directory=PAGE / "assets"), name="assets")
    app.mount("/swagger", Assets(directory=SWAGGER), name="swagger")


@router.api_route("/", methods=["GET", "HEAD"])
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html", headers=HEADERS)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs() -> FileResponse:
    return FileResponse(PAGE / "docs.html", headers=DOCS_HEADERS)


@router.get("/ui")
async def fish_speech_path() -> RedirectResponse:
    return RedirectResponse("./")
