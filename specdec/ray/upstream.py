"""Send requests to replicas, and tell apart what may be tried at another one."""

import contextlib
import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from specdec.ray.headers import of_answer

REFUSED = {429, 503}
"""Statuses of a replica that has not begun: another one may."""
KEPT_S = 30.0
"""Seconds that a connection to a replica is kept unused: less than the replica's idle_timeout."""
READ_BYTES = 1 << 16
"""Bytes of an answer that are read ahead of a slow client; twice as many are never held."""
AT_ONCE = 1 << 16
"""Bytes of a body that are sent together with its head; a larger one goes on in parts."""
MOST_SMALL = 4 << 20
"""Bytes of an answer that the router reads itself."""


class Lost(Exception):
    """A replica was sent a request, and was gone before its answer began."""


class Unreached(Exception):
    """A replica was never sent a request: it cannot be connected."""


class Late(Exception):
    """A replica has sent nothing for as long as `answer_timeout`."""


class TooLong(Exception):
    """An answer is longer than the router reads itself."""


class Sent(NamedTuple):
    """What is sent to a replica, whichever it is."""

    method: str
    path: str
    """Path and query, as the client wrote them."""
    headers: CIMultiDict[str]
    body: bytes


@dataclass(slots=True)
class Answer:
    """An answer that has begun."""

    response: aiohttp.ClientResponse
    first: bytes
    """The first bytes of its body; there are none only if it has no body."""

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def headers(self) -> CIMultiDict[str]:
        """Headers that go on to the client."""
        return of_answer(self.response.headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        piece = self.first
        while piece:
            yield piece
            with _named_errors():
                piece = await self.response.content.readany()

    async def whole(self) -> bytes:
        """Read a small body."""
        data = b""
        async for piece in self.pieces():
            data += piece
            if len(data) > MOST_SMALL:
                raise TooLong
        return data


class Upstream:
    """Connections to replicas. Every request of a client has its own while it is under way."""

    def __init__(self, connect_timeout: float, answer_timeout: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, ttl_dns_cache=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=answer_timeout),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def ask(self, url: str, sent: Sent) -> AsyncIterator[Answer]:
        """Send a request and wait until its answer begins; one that is not read to its end is cut off."""
        with _named_errors():
            response = await self._session.request(
                sent.method,
                URL(url + sent.path, encoded=True),
                headers=sent.headers,
                data=(sent.body if len(sent.body) <= AT_ONCE else io.BytesIO(sent.body)) or None,
                allow_redirects=False,
            )
        try:
            with _named_errors():
                first = await response.content.readany()
            yield Answer(response, first)
        finally:
            response.close()


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Translate the errors of a connection."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Unreached(str(error)) from error
    except aiohttp.ServerTimeoutError as error:
        raise Late from error
    except aiohttp.ClientError as error:
        raise Lost(str(error) or type(error).__name__) from error
