"""Errors in Anthropic's format."""

from collections.abc import Mapping
from typing import Any

from specdec.server.failures import Failure

PATH = "/v1/messages"
VERSION = "anthropic-version"
"""Header of every request of Anthropic's clients, on any path."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error type by status; other client errors are invalid requests, other server errors API errors."""


def error_body(failure: Failure) -> dict[str, Any]:
    default = "invalid_request_error" if failure.status < 500 else "api_error"
    return {"type": "error", "error": {"type": KINDS.get(failure.status, default), "message": str(failure)}}


def speaks_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request uses Anthropic's API, and gets errors in its format."""
    return VERSION in headers or path == PATH or path.startswith(f"{PATH}/")
