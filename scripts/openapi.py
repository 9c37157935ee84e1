"""Writes docs/openapi.json: what the HTTP API takes, from the fields that read it (`python scripts/openapi.py FILE`).

Ranges and what depends on the model are the gateway's to check; docs/api.md tells of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from twostroke.services.gateway.http.chat_fields import ChatFields
from twostroke.services.gateway.http.completion_fields import CompletionFields
from twostroke.services.gateway.http.fields import Fields
from twostroke.services.gateway.http.tokenize import DetokenizeFields, TokenizeFields

VERSION = "1"
NULL = {"type": "null"}
IDS = {"type": "array", "items": {"type": "integer"}}
TEXTS = {"type": "array", "items": {"type": "string"}}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": 4096,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
            },
        },
    },
}
SHAPES: dict[str, Any] = {
    "prompt": {"anyOf": [{"type": "string"}, IDS, TEXTS, {"type": "array", "items": IDS}]},
    "messages": MESSAGES,
    "stop": {"anyOf": [{"type": "string"}, TEXTS]},
    "tools": {"type": "array", "items": {"type": "object"}},
    "tool_choice": {"anyOf": [{"type": "string"}, {"type": "object"}]},
}
"""Fields whose readers take more forms than their type says, or say less."""
TEXT_ONLY = {("TokenizeFields", "prompt")}
ERRORS = {
    "400": "a field is wrong; `param` names it",
    "401": "no valid credentials",
    "403": "not allowed",
    "404": "another model or path",
    "408": "the request did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "the gateway or the tenant has its fill; Retry-After",
    "500": "a fault of the gateway",
    "503": "no worker, or a drain; Retry-After",
    "504": "x-request-timeout passed",
}
ERROR = {
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
                "code": {"type": "string"},
            },
        }
    },
}
POSTS: tuple[tuple[str, type[Fields], str, tuple[str, ...], bool], ...] = (
    ("/v1/completions", CompletionFields, "Continues text or tokens", ("id", "object", "model", "choices"), True),
    ("/v1/chat/completions", ChatFields, "Answers a conversation", ("id", "object", "model", "choices"), True),
    ("/tokenize", TokenizeFields, "Ids as a request would run them", ("count", "max_model_len", "tokens"), False),
    ("/detokenize", DetokenizeFields, "The text of tokens", ("prompt",), False),
)


def request_schema(fields: type[Fields]) -> dict[str, Any]:
    """Of a body; every field but those that must be there may be null."""
    schema = fields.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    for name, told in schema["properties"].items():
        told.pop("title", None)
        if name in SHAPES and (fields.__name__, name) not in TEXT_ONLY:
            told.clear()
            told.update(SHAPES[name])
        if name not in required:
            options = told.pop("anyOf", None) or [{key: told.pop(key) for key in list(told) if key != "default"}]
            told["anyOf"] = options if NULL in options else [*options, NULL]
    asks_nothing = {name: {"enum": [*harmless, None]} for name, harmless in fields.unsupported.items()}
    properties = {**schema["properties"], **asks_nothing}
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def response(what: str, schema: dict[str, Any], *, events: bool = False) -> dict[str, Any]:
    """JSON, or a stream of events."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": what, "content": content}


def operation(summary: str, good: dict[str, Any], *codes: str, body: str = "") -> dict[str, Any]:
    """`codes`: statuses of errors. `body`: name of the request's schema."""
    error = {"$ref": "#/components/schemas/Error"}
    told: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": good, **{code: response(ERRORS[code], error) for code in codes}},
    }
    if body:
        reference = {"$ref": f"#/components/schemas/{body}"}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return told


def document() -> dict[str, Any]:
    """All of it."""
    schemas: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for path, fields, summary, members, events in POSTS:
        schemas[fields.__name__] = request_schema(fields)
        good = {"type": "object", "required": list(members)}
        told = operation(summary, response("The answer", good, events=events), *ERRORS, body=fields.__name__)
        paths[path] = {"post": told}
    listed = {"type": "object", "required": ["object", "data"]}
    about = {"type": "object", "required": ["id", "object"]}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models"] = {"get": operation("The served model", response("A list", listed), "401", "403")}
    paths["/v1/models/{model}"] = {
        "parameters": [name],
        "get": operation("One model", response("The model", about), "400", "401", "403", "404"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "twostroke", "version": VERSION, "description": "docs/api.md says what each field means."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=1, ensure_ascii=False) + "\n")
