"""Errors of the hub with their remedies."""

import errno
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, errors

from specdec.errors import CheckpointError
from specdec.models.hub.names import HubName

# From the HTTP library of the installed huggingface_hub version.
HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]

RAISED = (HTTPError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Exceptions of hub requests; the last five occur if the server is not a hub."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SHOWN = 3
"""Maximum files named in an error."""
REFUSALS = {
    401: "refuses it (401: it may be private or gone, or the token is not accepted)",
    403: "refuses it (403: it is gated, or the token may not read it)",
    404: "has no model of that name (404: it may be renamed or gone)",
}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
LOGGERS = ("huggingface_hub.utils._http", "httpx", "httpx2")
"""Loggers that log addresses."""
_USER = re.compile(r"(https?://)[^/\s@]*@", re.I)
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", re.I)


def cache_folder() -> Path:
    """Return the download folder."""
    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def size_of(num_bytes: int) -> str:
    """Format a size."""
    return f"{num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB)"


def few(files: Iterable[str]) -> str:
    """Format the first of some files."""
    shown = sorted(files)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{', '.join(shown[:SHOWN]) or 'nothing'}{more}"


def without_user(text: object) -> str:
    """Remove secrets from addresses: user, password, and the query, which may be signed."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", str(text)))


def explain(error: Exception, name: HubName) -> CheckpointError:
    """Return an error with the cause and the remedy."""
    return CheckpointError(without_user(_explain(error, name)), field="model")


def in_part(name: HubName, folder: Path, lacks: Iterable[str], error: Exception) -> CheckpointError:
    """Return the error for a partly cached model whose rest cannot be downloaded."""
    return CheckpointError(
        f"{name} is in the cache only in part: {folder} lacks {few(lacks)}, and {_why_no_more(error, name)}; "
        "or give the path of that folder, if it is whole without",
        field="model",
    )


def begun(name: HubName, folder: Path, error: Exception) -> CheckpointError:
    """Return the error for an interrupted download that cannot resume now."""
    return CheckpointError(
        f"{name} is in the cache only in part: its download to {folder} was interrupted, and would go on "
        f"where it stopped, but {_why_no_more(error, name)}",
        field="model",
    )


def refusal_of(error: Exception) -> str | None:
    """Return the hub's reason for refusing a model, or None for other errors."""
    if not isinstance(error, errors.HfHubHTTPError) or error.response.status_code not in REFUSALS:
        return None
    return f"{without_user(constants.ENDPOINT)} {REFUSALS[error.response.status_code]}"


def _why_no_more(error: Exception, name: HubName) -> str:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE prevents the download of the rest; unset it and run this again"
    return without_user(_explain(error, name))


def no_room(name: HubName, needed: int, free: int) -> CheckpointError:
    """Return the error for a disk that is too small for a download."""
    return CheckpointError(
        f"{name} needs {size_of(needed)} more in {cache_folder()}, where {size_of(free)} are free; make room "
        "(`hf cache rm` deletes models), or set HF_HOME to a folder on a larger disk",
        field="model",
    )


def check_endpoint() -> None:
    """Refuse an invalid HF_ENDPOINT, and keep its password out of logs."""
    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"HF_ENDPOINT is {constants.ENDPOINT!r}, which is no address")
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_hide_user)


def _hide_user(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_user(record.getMessage()), ()
    return True


def _explain(error: BaseException, name: HubName) -> str:
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        return _explain(error.__cause__, name)
    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{name.repo}"
    match error:
        case errors.OfflineModeIsEnabled():
            return (
                f"{name} is not in {cache_folder()}, and HF_HUB_OFFLINE prevents the download; unset it, "
                "or give the path of a folder"
            )
        case errors.GatedRepoError():
            return f"{name} is gated: accept its licence at {page}, then {LOG_IN}"
        case errors.RevisionNotFoundError():
            return f"{name.repo} has no revision {name.revision}; {page}/commits lists branches and commits"
        case errors.RepositoryNotFoundError():
            return (
                f"{name.repo} is not a folder here, and {hub} shows no model of that name: check the "
                f"spelling, or, if it is private, {LOG_IN}"
            )
        case errors.HfHubHTTPError():
            return _refusal(error, name)
    if isinstance(error, HTTPError):
        return (
            f"{hub} cannot be reached for {name} ({_first_line(error)}); check the network and HF_ENDPOINT, "
            f"then run this again, or give the path of a folder: there is none called {name} here"
        )
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{name} does not fit on the disk of {cache_folder()} ({error.strerror}); make room, or set "
            "HF_HOME to a folder on a larger disk, then run this again"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"{name} cannot be kept in {cache_folder()} ({error.strerror}: {error.filename}); set HF_HOME "
            "to a folder that can be written"
        )
    return (
        f"{hub} does not answer for {name} as a Hugging Face hub does ({_first_line(error)}); check "
        "HF_ENDPOINT, proxies and what the network asks to log in to"
    )


def _refusal(error: errors.HfHubHTTPError, name: HubName) -> str:
    status, hub = error.response.status_code, constants.ENDPOINT
    page = f"{hub}/{name.repo}"
    said = f" ({error.server_message})" if error.server_message else ""
    match status:
        case 401:
            return f"{hub} does not accept the token that was sent for {name}{said}; {LOG_IN}"
        case 403:
            return (
                f"{hub} refuses access to {name}{said}: accept its licence at {page}, then {LOG_IN} with a "
                "token that may read it"
            )
        case 404:
            return f"{hub} lists a file of {name} that it does not have{said}; run this again"
    return f"{hub} answered {status} for {name}{said}; run this again later"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
