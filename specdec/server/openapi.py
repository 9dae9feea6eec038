"""The OpenAPI description of the server, generated from the request models."""

import json
from functools import cache
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec import __version__
from specdec.server.anthropic.bodies import CountBody, MessageBody
from specdec.server.bodies import ChatBody, CompletionBody
from specdec.server.plain import DetokenizeBody, TokenizeBody
from specdec.server.responses.bodies import ResponseBody

BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Complete prompts, whole or as server-sent events"),
    "/v1/chat/completions": (ChatBody, "Answer a chat, whole or as server-sent events"),
    "/v1/responses": (ResponseBody, "Answer with OpenAI's Responses API"),
    "/v1/messages": (MessageBody, "Answer with Anthropic's Messages API"),
    "/v1/messages/count_tokens": (CountBody, "Count the tokens of a prompt of the Messages API"),
    "/tokenize": (TokenizeBody, "Turn a prompt or a chat into token ids"),
    "/detokenize": (DetokenizeBody, "Turn token ids into text"),
}
PLAIN = {
    "/": "The playground, a page for browsers",
    "/v1/models": "List the models",
    "/v1/models/{name}": "Describe one model",
    "/v1/responses/{name}": "Return a stored response",
    "/health": "Liveness",
    "/ready": "Readiness",
    "/metrics": "Prometheus metrics",
    "/server_info": "Settings in effect and speculation statistics",
    "/model_info": "The model served, in SGLang's format",
    "/version": "Return the version of specdec",
    "/openapi.json": "This description",
    "/docs": "This description as a page",
}
ORDERS = {"/flush_cache": "Drop the suffix index and the prefix cache"}
"""POST routes without a body."""
ERRORS = {
    "400": "Invalid request; `param` names the field",
    "401": "A valid API key is required",
    "403": "Origin not allowed",
    "404": "No such model or response",
    "405": "Method not allowed",
    "408": "The body took too long to arrive",
    "409": "A bootstrap_room has been used before",
    "413": "The body is too large",
    "415": "Unknown content encoding",
    "429": "Too many requests in flight",
    "500": "The engine or the server failed; see its log",
    "503": "The server is stopping, or the engine has stopped",
    "504": "The answer took too long",
}
REFS = "#/components/schemas/{model}"


def describe() -> dict[str, Any]:
    """Return the description, in OpenAPI 3.1."""
    _, definitions = models_json_schema(
        [(body, "validation") for body, _ in BODIES.values()], ref_template=REFS
    )
    schemas = definitions["$defs"] | {"Error": _error()}
    paths: dict[str, Any] = {path: {"get": _operation(description)} for path, description in PLAIN.items()}
    paths |= {path: {"post": _operation(description)} for path, description in ORDERS.items()}
    paths["/v1/responses/{name}"]["delete"] = _operation("Delete a stored response")
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    for path in (path for path in paths if "{name}" in path):
        for operation in paths[path].values():
            operation["parameters"] = [parameter]
    for path, (body, description) in BODIES.items():
        content = {"application/json": {"schema": {"$ref": REFS.format(model=body.__name__)}}}
        paths[path] = {
            "post": _operation(description) | {"requestBody": {"required": True, "content": content}}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "bare_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"bare_key": []}],
    }


@cache
def described() -> str:
    """Return the description as JSON; generating it takes a while."""
    return json.dumps(describe())


@cache
def documented() -> str:
    """Return the description as an HTML page without scripts or styles, which the page's policy allows."""
    document = describe()
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td><td>{escape(operation['summary'])}</td></tr>"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>specdec API</title>'
        f"<h1>specdec {escape(document['info']['version'])}</h1>"
        '<p>Request and response fields: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<table><tr><th>Method</th><th>Path</th><th>Summary</th></tr>{rows}</table></html>"
    )


def _operation(description: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REFS.format(model="Error")}}}
    refused = {status: {"description": reason, "content": error} for status, reason in ERRORS.items()}
    return {"summary": description, "responses": {"200": {"description": description}, **refused}}


def _error() -> dict[str, Any]:
    texts = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
    error = {"type": "object", "properties": texts, "required": list(texts)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
