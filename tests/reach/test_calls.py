"""Responses of a server that is no peer are bounded, and refused before they are parsed."""

import asyncio
import contextlib
from typing import ClassVar

import pytest

from specdec.reach import peer_client as calls_module
from specdec.reach.allowed_peers import Endpoint
from specdec.reach.messages import CloseResponse
from specdec.reach.peer_client import MOST_ANSWER_BYTES, PeerClient
from specdec.reach.protocol import ReachError, Secret
from specdec.reach.signed import IV_BYTES, SignedRequest

SECRET = Secret("a-secret-of-the-tests")
OVERHEAD = IV_BYTES + 16
"""Bytes that encryption adds to a response."""


class Recorded(CloseResponse):
    """A JSON parser that records the size of its inputs."""

    parsed: ClassVar[list[int]] = []

    @classmethod
    def from_json(cls, data: bytes) -> "Recorded":
        cls.parsed.append(len(data))
        return cls(intact=True)


async def answered(
    num_bytes: int, status: int = 200, signed_status: int = 200, secret: Secret | None = SECRET
) -> Recorded:
    """Call a server that signs one status (if it has a secret) and sends another."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = b"[" * num_bytes
        if secret:
            header = head.partition("Authorization: ")[2].partition("\r\n")[0]
            request = SignedRequest.verified(SECRET, "GET", "/reach/agents", [header])
            body = request.encrypt(secret, signed_status, body[OVERHEAD:])
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {num_bytes}\r\n\r\n".encode() + body)
        writer.close()

    calls = PeerClient(SECRET)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            at = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
            return await calls.get(at, "/reach/agents", Recorded)
        finally:
            await calls.close()


def test_an_answer_that_is_too_long_is_not_parsed() -> None:
    Recorded.parsed.clear()
    assert asyncio.run(answered(MOST_ANSWER_BYTES)).intact
    assert Recorded.parsed == [MOST_ANSWER_BYTES - OVERHEAD], "the control"
    with pytest.raises(ReachError) as caught:
        asyncio.run(answered(MOST_ANSWER_BYTES + 1))
    assert caught.value.reason == "garbled" and len(Recorded.parsed) == 1


@pytest.mark.parametrize("status", [200, 401, 404, 500])
@pytest.mark.parametrize("secret", [None, Secret("another-secret-of-tests")])
def test_an_answer_without_a_valid_signature_is_not_parsed(
    status: int, secret: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorded.parsed.clear()
    monkeypatch.setattr(calls_module, "read_refusal", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ReachError, match="SPECDEC_REACH_SECRET") as caught:
        asyncio.run(answered(100, status, status, secret))
    assert caught.value.reason == ("unauthorized" if status == 401 else "garbled") and not Recorded.parsed


@pytest.mark.parametrize(("status", "signed_status"), [(200, 404), (404, 200), (201, 200)])
def test_a_status_that_was_changed_is_refused(status: int, signed_status: int) -> None:
    Recorded.parsed.clear()
    with pytest.raises(ReachError, match="does not decrypt"):
        asyncio.run(answered(100, status, signed_status))
    assert not Recorded.parsed


def test_no_nonce_is_sent_twice_if_a_server_closes_idle_connections() -> None:
    """The server closes as the next request arrives, so that the client has to retry."""
    nonces: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            for is_kept in (True, False):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                header = head.partition("Authorization: ")[2].partition("\r\n")[0]
                request = SignedRequest.verified(SECRET, "GET", "/reach/agents", [header])
                nonces.append(request.nonce)
                if is_kept:
                    body = request.encrypt(SECRET, 200, b"{}")
                    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def test() -> None:
        calls = PeerClient(SECRET)
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            at = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
            for _ in range(3):
                assert (await calls.get(at, "/reach/agents", Recorded)).intact
            await calls.close()

    asyncio.run(test())
    assert len(nonces) == len({*nonces}) == 3
