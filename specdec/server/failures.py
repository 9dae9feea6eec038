"""Errors in OpenAI's format."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, InvalidURLError, LineTooLong
from pydantic import ValidationError

from specdec.errors import CapacityError, EngineError, SpecdecError
from specdec.server.remedies import remedy

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Error type by status; all others are server errors."""


KINDS_OF_VALUE = {"str", "int", "float", "bool", "list", "dict"}
"""Suffixes that pydantic adds to the location of a union's field."""


SEVERAL = {
    "prompt": "give a string, token ids, or a list of strings or of lists of ids",
    "stop": "give a string or a list of strings",
    "bootstrap_host": "give a host, or a list with one for each prompt",
    "bootstrap_port": "give a port from 1 to 65535, or a list with one for each prompt",
    "bootstrap_room": "give an integer of 63 bits, or a list with one for each prompt",
    "keep_alive": "give seconds, or a string such as 30s, 5m or 2h; -1 keeps the model loaded",
}
"""Remedies of fields with several allowed types: pydantic's errors only cover the first."""


UNKNOWN_ENCODING = "Content-Encoding: this server does not support it; send gzip, deflate, or no encoding."


class Failure(Exception):
    """An error response. `param` names the invalid field, `code` is machine-readable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})
        self.trace: Exception | None = None
        """Internal exception to log; the engine logs its own."""

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def reason(self, *, in_full: bool) -> dict[str, str]:
        """Return log fields; the message, which may repeat the request, only with `in_full`."""
        fields = {"code": self.code, "param": self.param, "reason": repr(str(self)) if in_full else None}
        return {name: value for name, value in fields.items() if value}

    def response(self, body: Mapping[str, Any] | None = None) -> web.Response:
        """Return it as a response, optionally with another API's body."""
        text = json.dumps(self.body if body is None else body)
        return web.Response(
            status=self.status, text=text, content_type="application/json", headers=self.headers
        )


ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task, a generator or the process, and are not errors."""


class Panic(Exception):
    """An extension module panicked: Rust's panics are not `Exception`s and would bypass all handlers."""


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Convert a `BaseException` that is an error to a `Panic`."""
    try:
        yield
    except (Exception, *ENDS):
        raise
    except BaseException as error:
        raise Panic(f"{type(error).__name__}: {error}") from error


def release_frames(error: BaseException | None) -> None:
    """Drop the frames of a handled error: they hold the request's body in a reference cycle."""
    while error:
        error.__traceback__, error = None, error.__context__


def failure_of(error: Exception) -> Failure:
    """Return the client's view of an error: client errors in full, internal ones without details."""
    match error:
        case Failure():
            return error
        case EngineError():
            return Failure(500, without_inside(error), code="engine_error")
        case CapacityError():
            return Failure(503, str(error), code="capacity", headers={"Retry-After": "1"})
        case SpecdecError():
            # The same message as in Python, where a setting is named with its class.
            message = str(error).replace("SamplingParams.", "").replace("SamplingParams ", "the request ")
            long = error.field == "prompt" and "max_model_len" in message
            return Failure(400, message, param=error.field, code="context_length_exceeded" if long else None)
        case HttpProcessingError():
            return _malformed_http(error)
        case web.HTTPMethodNotAllowed():
            allowed = " or ".join(sorted(error.allowed_methods))
            return Failure(405, f"This address takes {allowed}.", headers=_kept(error.headers))
        case web.HTTPRequestEntityTooLarge():
            return Failure(
                413, "The body has more bytes than max_body_bytes, a setting of the server, allows."
            )
        case web.HTTPExpectationFailed():
            return Failure(417, "Expect: only 100-continue is supported.")
        case web.HTTPException():
            return Failure(error.status, error.reason, headers=_kept(error.headers))
        case _:
            failure = Failure(500, "The server failed; see its log.", code="internal_error")
            failure.trace = error
            return failure


def _malformed_http(error: HttpProcessingError) -> Failure:
    """Describe malformed HTTP without echoing it, since it may contain keys."""
    match error:
        case LineTooLong():
            return Failure(431, "The first line or a header is longer than the server reads; send less.")
        case ContentEncodingError():
            return Failure(415, UNKNOWN_ENCODING)
        case InvalidURLError():
            return Failure(400, "The address in the first line cannot be read.")
        case _:
            # After the first line aiohttp shows the data it parsed.
            reason = error.message.partition("\n")[0].partition(": ")[0].rstrip(":.")
            return Failure(400, f"This is not a valid HTTP request: {reason}.")


Names = Mapping[str, str]
"""Client field names for fields that the engine names differently."""


SAME: Names = {}
"""No renames."""


def renamed(error: Exception, names: Names) -> Failure:
    """Rename an error's fields to the client's names, including parts of a field."""
    failure = failure_of(error)
    param, text = failure.param, str(failure)
    if param is None:
        return failure
    matches = [name for name in names if name in text and f"{name}.".startswith(f"{param}.")]
    field = max(matches, key=len, default=param)
    text = text.replace(field, names.get(field, field), 1)
    param = names.get(param, param)
    return Failure(failure.status, text, param=param, code=failure.code, headers=failure.headers)


def chained(inner: Names, outer: Names) -> Names:
    """Return the composition of two renamings."""
    return {**outer, **{name: outer.get(target, target) for name, target in inner.items()}}


@contextlib.contextmanager
def naming(names: Names) -> Iterator[None]:
    """Re-raise client errors under the client's field names."""
    try:
        yield
    except (Failure, SpecdecError) as error:
        raise renamed(error, names) from None


def without_inside(error: EngineError | str) -> str:
    """Hide an internal error's message: it may contain paths and texts, and is in the log."""
    summary, colon, _ = str(error).partition(": ")
    return f"{summary}; see the server's log." if colon else summary


def validation_failure(error: ValidationError) -> Failure:
    """Return an error that names the first invalid field and the expected value."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in KINDS_OF_VALUE)
    )
    field = str(first["loc"][0]) if first["loc"] else None
    if field in SEVERAL:
        return Failure(400, f"{field}: {SEVERAL[field]}.", param=field)
    return Failure(400, f"{location or 'the body'}: {remedy(first)}.", param=field)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an error that a client needs, such as Allow."""
    return {name: value for name, value in headers.items() if name.lower() == "allow"}
