"""Client of a peer's side channel: signed requests, bounded in time and bytes, with named failures."""

import asyncio
from typing import Literal, TypeVar

import aiohttp
from yarl import URL

from specdec.reach.allowed_peers import Endpoint
from specdec.reach.messages import ChannelMessage, read_refusal
from specdec.reach.protocol import STATUSES, VARIABLE, WAIT_S, ReachError, Secret
from specdec.reach.signed import SignedRequest

CONNECT_S = 2.0
CALL_S = 3.0
"""Timeout of a call that is answered at once."""
WAITING_S = WAIT_S + CALL_S
"""Timeout of a call that may wait for the peer's engine."""
MOST_ANSWER_BYTES = 1 << 21
"""Maximum answer: the blocks of four million tokens, or a hidden state. Twenty answers of 16 MiB from an
impostor stopped the event loop for 6.7 s and took 2 GB."""
MOST_CONNECTIONS, MOST_OF_A_PEER = 1024, 256

Kind = Literal["lease", "room", "beat"]
"""Kind of call; each has its own connections."""
A = TypeVar("A", bound=ChannelMessage)


class PeerClient:
    """Connections to all peers.

    A few clients waiting for rooms cannot exhaust the connections of leases, nor these the ones of beats.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._sessions: dict[Kind, aiohttp.ClientSession] = {}

    async def get(self, endpoint: Endpoint, path: str, answer: type[A], limit_s: float = CALL_S) -> A:
        return await self._call(endpoint, "GET", path, b"", answer, limit_s)

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: ChannelMessage,
        answer: type[A],
        limit_s: float = CALL_S,
        kind: Kind = "lease",
    ) -> A:
        return await self._call(endpoint, "POST", path, body.write(), answer, limit_s, kind)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _call(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        body: bytes,
        answer: type[A],
        limit_s: float,
        kind: Kind = "lease",
    ) -> A:
        try:
            async with asyncio.timeout(limit_s):
                status, data = await self._exchange(endpoint, method, path, body, kind)
        except TimeoutError:
            raise ReachError("peer_slow", f"{endpoint} has not answered within {limit_s:g} s.") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ReachError("peer_down", f"{endpoint} cannot be reached: {type(error).__name__}.") from None
        if status != 200:
            raise read_refusal(data, STATUSES)
        try:
            return answer.from_json(data)
        except ReachError as refusal:
            raise ReachError("garbled", f"{endpoint} sent an unexpected answer: {refusal}") from None

    async def _exchange(
        self, endpoint: Endpoint, method: str, path: str, body: bytes, kind: Kind
    ) -> tuple[int, bytes]:
        """Return an answer's status and decrypted body; raise if it cannot be decrypted."""
        url = URL(f"http://{endpoint}{path}")
        signed = SignedRequest.new(method, url.raw_path_qs, body)
        headers = {"Authorization": signed.authorization(self._secret)}
        async with self._session(kind).request(
            method, url, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            data = await self._read(endpoint, response)
            opened = signed.decrypt(self._secret, response.status, data)
            if opened is not None:
                return response.status, opened
            response.close()
        if response.status == 401:
            raise ReachError(
                "unauthorized",
                f"{endpoint} has another {VARIABLE}, or is not a specdec server of this version; start both "
                "servers with the same one.",
            )
        raise ReachError(
            "garbled",
            f"{endpoint} sends an answer that {VARIABLE} does not decrypt; check that its port is the "
            "reach_port of a server with the same one.",
        )

    async def _read(self, endpoint: Endpoint, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > MOST_ANSWER_BYTES:
                response.close()
                raise ReachError("garbled", f"{endpoint} answers with more than {MOST_ANSWER_BYTES:,} bytes.")
        return bytes(data)

    def _session(self, kind: Kind) -> aiohttp.ClientSession:
        """Return the session of one kind of call, created within the event loop.

        Each call has its own connection: if a kept one is closed, aiohttp repeats a GET with the same nonce.
        """
        if kind not in self._sessions:
            self._sessions[kind] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=MOST_CONNECTIONS, limit_per_host=MOST_OF_A_PEER, force_close=True
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return self._sessions[kind]
