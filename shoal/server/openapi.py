"""The OpenAPI document of routes that read their bodies themselves."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from shoal.audio.formats import FORMATS
from shoal.server.parsing import MULTIPART

REFERENCE = "#/components/schemas/{model}"
_components: dict[str, Any] = {
    "Problem": {
        "type": "object",
        "required": ["statusCode", "message", "error"],
        "properties": {
            "statusCode": {"type": "integer"},
            "message": {"type": "string"},
            "error": {"type": "string"},
        },
    },
    "Findings": {
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
    "OpenAIProblem": {
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

Responses = dict[int | str, dict[str, Any]]


def reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=name)}


def schema_of(model: type[BaseModel], mode: Any = "validation") -> dict[str, str]:
    """A reference to a model's schema, which is put where references point."""
    schema = model.model_json_schema(ref_template=REFERENCE, mode=mode)
    _components.update(schema.pop("$defs", {}))
    _components[model.__name__] = schema
    return reference(model.__name__)


def body_of(model: type[BaseModel], kinds: Sequence[str], examples: Mapping[str, Any] | None = None) -> dict[str, Any]:
    schema = schema_of(model)
    content = {
        kind: {"schema": schema} | ({"examples": examples} if examples and kind != MULTIPART else {}) for kind in kinds
    }
    return {"requestBody": {"required": True, "content": content}}


def form_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": list(properties),
        "properties": dict(properties),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {MULTIPART: {"schema": schema}}}}


def returns_audio(*others: str) -> Responses:
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {known.media_type: binary for known in FORMATS.values()}
    content |= {kind: {} for kind in others}
    headers = {
        name: {"schema": {"type": "string"}, "description": what}
        for name, what in (
            ("X-Request-ID", "The id of this request in the log."),
            ("X-Sample-Rate", "Samples per second in the audio."),
            ("X-Seed", "The seed that gives this audio again."),
        )
    }
    return {200: {"description": "The audio, whole or streamed.", "content": content, "headers": headers}}


def returns(model: type[BaseModel], *kinds: str) -> Responses:
    schema = schema_of(model, "serialization")
    return {200: {"description": "Done.", "content": {kind: {"schema": schema} for kind in kinds}}}


def answers(*statuses: int, openai: bool = False) -> Responses:
    """The refusals of a route, each in the shape of its API."""
    shapes = {status: "OpenAIProblem" if openai else "Findings" if status == 422 else "Problem" for status in statuses}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": reference(shape)}},
        }
        for status, shape in shapes.items()
    }


def document(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """The whole document, made once. It asks for keys where the server does."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )
        made.setdefault("components", {}).setdefault("schemas", {}).update(_components)
        for operation in (each for path in made["paths"].values() for each in path.values() if not keyed):
            operation.pop("security", None)
        app.openapi_schema = made
    return app.openapi_schema
