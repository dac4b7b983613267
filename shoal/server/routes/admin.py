"""`/v1/admin/*`: for the operator of a server, with a key of its own. Without `admin_key` the routes do not exist."""

import hmac
from typing import Annotated, Protocol, runtime_checkable

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from shoal.api.exceptions import Unauthorized
from shoal.api.keys import digest
from shoal.errors import InvalidRequest
from shoal.server.openapi import error_responses
from shoal.server.state import State

admin_bearer = HTTPBearer(auto_error=False, description="The key of the setting `admin_key`.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(admin_bearer)]


async def require_admin(state: State, credentials: Credentials) -> None:
    """Raise Unauthorized unless the request has the server's `admin_key`."""
    sent, expected = credentials.credentials if credentials else "", state.config.admin_key or ""
    # Hashes have one length, so that the time of the comparison reveals nothing.
    if not expected or not hmac.compare_digest(digest(sent), digest(expected)):
        raise Unauthorized("this route needs the server's admin_key: send Authorization: Bearer KEY")


router = APIRouter(tags=["Operations"], prefix="/v1/admin", dependencies=[Depends(require_admin)])


@runtime_checkable
class ReleasesMemory(Protocol):
    """An engine with caches that can be dropped."""

    async def release_memory(self) -> dict[str, int]: ...


@router.post(
    "/release-memory",
    summary="Drop cached prompt prefixes and return cached memory to the GPU and the system",
    response_class=JSONResponse,
    responses=error_responses(400, 401, 503),
)
async def release_memory(state: State) -> JSONResponse:
    """Requests in progress are not affected; the next request of each voice computes its prompt again."""
    service = state.lifecycle.require_engine().service
    if not isinstance(service, ReleasesMemory):
        raise InvalidRequest("the engines of a cluster release no memory on request: restart a replica instead")
    return JSONResponse(await service.release_memory())
