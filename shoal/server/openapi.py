"""Build the OpenAPI document: FastAPI cannot infer the bodies, because the routes read and parse them themselves."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from shoal.api.bodies.parsing import MULTIPART
from shoal.audio.formats import FORMATS

REFERENCE = "#/components/schemas/{model}"
_components: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["statusCode", "message", "error"],
        "properties": {
            "statusCode": {"type": "integer"},
            "message": {"type": "string"},
            "error": {"type": "string"},
        },
    },
    "ValidationErrors": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["type", "loc", "msg"],
            "properties": {
                "type": {"type": "string"},
                "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
                "msg": {"type": "string"},
            },
        },
    },
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
}

_components["ElevenLabsError"] = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "detail": {
            "oneOf": [
                {
                    "type": "object",
                    "required": ["status", "message"],
                    "properties": {"status": {"type": "string"}, "message": {"type": "string"}},
                },
                _components["ValidationErrors"],
            ]
        }
    },
}

Responses = dict[int | str, dict[str, Any]]


def reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=name)}


def schema_of(model: type[BaseModel], mode: Any = "validation") -> dict[str, str]:
    """Register the schema of a model and return a reference to it."""
    schema = model.model_json_schema(ref_template=REFERENCE, mode=mode)
    _components.update(schema.pop("$defs", {}))
    _components[model.__name__] = schema
    return reference(model.__name__)


def request_body(
    model: type[BaseModel], kinds: Sequence[str], examples: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    schema = schema_of(model)
    content = {
        kind: {"schema": schema} | ({"examples": examples} if examples and kind != MULTIPART else {}) for kind in kinds
    }
    return {"requestBody": {"required": True, "content": content}}


def form_body(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """Describe a form. By default all of its parts are required."""
    schema = {
        "type": "object",
        "required": list(properties if required is None else required),
        "properties": dict(properties),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {MULTIPART: {"schema": schema}}}}


def audio_response(*other_types: str) -> Responses:
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {known.media_type: binary for known in FORMATS.values()}
    content |= {kind: {} for kind in other_types}
    headers = {
        name: {"schema": {"type": "string"}, "description": description}
        for name, description in (
            ("X-Request-ID", "Id of this request in the server's log."),
            ("X-Sample-Rate", "Sample rate of the audio in Hz."),
            ("X-Seed", "Seed that reproduces this audio."),
            ("X-Ignored-Fields", "Fields of the request that were accepted without effect, if any."),
        )
    }
    return {200: {"description": "Audio, whole or streamed.", "content": content, "headers": headers}}


def model_response(model: type[BaseModel], *kinds: str) -> Responses:
    schema = schema_of(model, "serialization")
    return {200: {"description": "Success.", "content": {kind: {"schema": schema} for kind in kinds}}}


def error_responses(*statuses: int, openai: bool = False, elevenlabs: bool = False) -> Responses:
    """Describe the error responses of a route, in the format of its API."""

    def schema_name(status: int) -> str:
        if openai or elevenlabs:
            return "OpenAIError" if openai else "ElevenLabsError"
        return "ValidationErrors" if status == 422 else "Error"

    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": reference(schema_name(status))}},
        }
        for status in statuses
    }


def document(app: FastAPI, *, requires_key: bool) -> dict[str, Any]:
    """Return the cached document. It declares authentication only if the server requires keys."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(_components)
        for operation in (each for path in schema["paths"].values() for each in path.values() if not requires_key):
            operation.pop("security", None)
        app.openapi_schema = schema
    return app.openapi_schema
