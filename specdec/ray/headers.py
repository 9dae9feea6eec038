"""Headers to forward, and those that belong to one connection."""

from collections.abc import Iterable

from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, 7.6.1, and older names."""
OF_REQUEST = HOP_BY_HOP | {"expect", "content-length"}
"""The body has been received when a request is forwarded, with a new length."""


def of_request(headers: CIMultiDictProxy[str], *, is_unpacked: bool) -> CIMultiDict[str]:
    """Return the headers that a replica gets; of a body that was unpacked not how it was packed."""
    without = OF_REQUEST | {"content-encoding"} if is_unpacked else OF_REQUEST
    return _without(headers, without)


def of_answer(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that the client gets."""
    return _without(headers, HOP_BY_HOP)


def _without(headers: CIMultiDictProxy[str], names: Iterable[str]) -> CIMultiDict[str]:
    listed = ",".join(headers.getall(hdrs.CONNECTION, ())).split(",")
    dropped = {*names, *(name.strip().lower() for name in listed)}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
