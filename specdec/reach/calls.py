"""Calls of a peer's side channel: bounded in time and bytes, and every way in which one fails has a name."""

import asyncio
from typing import Literal, TypeVar

import aiohttp
from yarl import URL

from specdec.reach.allowed import Endpoint
from specdec.reach.messages import Body, read_refusal
from specdec.reach.terms import STATUSES, VARIABLE, WAIT_S, Refusal, Secret

CONNECT_S = 2.0
CALL_S = 3.0
"""For a call that is answered at once."""
WAITING_S = WAIT_S + CALL_S
"""For one that may wait for the peer's engine."""
MOST_ANSWER_BYTES = 1 << 21
"""Of the blocks of four million tokens, or a hidden vector. Twenty answers of 16 MiB from an impostor stopped
the event loop for 6.7 s and took 2 GB."""
MOST_CONNECTIONS, MOST_OF_A_PEER = 1024, 256

Kind = Literal["lease", "room", "beat"]
"""What a call is about: each kind has connections of its own."""
A = TypeVar("A", bound=Body)


class Calls:
    """Holds the connections to all peers.

    A number is enough to wait for a room: that takes none from leases, nor these from beats.
    """

    def __init__(self, secret: Secret) -> None:
        self._headers = {"Authorization": secret.bearer}
        self._sessions: dict[Kind, aiohttp.ClientSession] = {}

    async def get(self, at: Endpoint, path: str, answer: type[A], limit_s: float = CALL_S) -> A:
        return await self._call(at, "GET", path, None, answer, limit_s)

    async def post(
        self,
        at: Endpoint,
        path: str,
        body: Body,
        answer: type[A],
        limit_s: float = CALL_S,
        kind: Kind = "lease",
    ) -> A:
        """Send a body. Once more if the connection was closed meanwhile: each call may be repeated."""
        return await self._call(at, "POST", path, body.write(), answer, limit_s, kind)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _call(
        self,
        at: Endpoint,
        method: str,
        path: str,
        body: bytes | None,
        answer: type[A],
        limit_s: float,
        kind: Kind = "lease",
    ) -> A:
        url = URL.build(scheme="http", host=at.host, port=at.port, path=path)
        try:
            async with asyncio.timeout(limit_s):
                try:
                    status, data = await self._exchange(url, method, body, kind)
                except aiohttp.ServerDisconnectedError:
                    status, data = await self._exchange(url, method, body, kind)
        except TimeoutError:
            raise Refusal("peer_slow", f"{at} has not answered within {limit_s:g} s.") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Refusal("peer_down", f"{at} cannot be asked: {type(error).__name__}.") from None
        if status != 200:
            refusal = read_refusal(data, STATUSES)
            if refusal.reason == "unauthorized":
                raise Refusal(
                    "unauthorized", f"{at} has another {VARIABLE}; start both servers with the same one."
                )
            raise refusal
        try:
            return answer.from_json(data)
        except Refusal as refusal:
            raise Refusal("garbled", f"{at} answers otherwise than expected: {refusal}") from None

    async def _exchange(self, url: URL, method: str, body: bytes | None, kind: Kind) -> tuple[int, bytes]:
        async with self._session(kind).request(
            method, url, data=body, headers=self._headers, allow_redirects=False
        ) as response:
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > MOST_ANSWER_BYTES:
                    response.close()
                    return 500, b""
            return response.status, bytes(data)

    def _session(self, kind: Kind) -> aiohttp.ClientSession:
        """Return the session of one kind of calls, which begins within the event loop."""
        if kind not in self._sessions:
            self._sessions[kind] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS, limit_per_host=MOST_OF_A_PEER),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return self._sessions[kind]
