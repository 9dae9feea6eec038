"""The side channel's signatures, attacked by an impostor that changes, replays and relays messages."""

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Callable

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from specdec.reach import channel, signed
from specdec.reach.protocol import ReachError, RoomReference, Secret
from specdec.reach.signed import MOST_SKEW_S, ReplayGuard, SignedRequest
from tests.reach.peers import PROMPT, SECRET, Clock, Lender, readable, reading, run

OWN, OTHER = Secret(SECRET), Secret(SECRET + "x")
PATH = "/reach/kept?since=5"


def authorization(request: SignedRequest, secret: Secret = OWN) -> list[str]:
    return [request.authorization(secret)]


def reason_of(call: Callable[..., object], *own: object) -> str | None:
    """Return why a call is refused, or None."""
    try:
        call(*own)
    except ReachError as refusal:
        return refusal.reason
    return None


def test_signatures_have_the_form_that_the_docs_describe() -> None:
    """Written from docs/disaggregation.md alone: routers in other languages depend on it."""

    def mac(*lines: str) -> bytes:
        return hmac.digest(SECRET.encode(), "\n".join(lines).encode(), "sha256")

    body_sha256, nonce = hashlib.sha256(b"{}").hexdigest(), "5" * 32
    request = SignedRequest("POST", PATH, 1_800_000_000, nonce, body_sha256)
    own = mac("specdec reach 2 request", "POST", PATH, "1800000000", nonce, body_sha256).hex()
    assert request.authorization(OWN) == f"Specdec-HMAC-SHA256 1800000000 {nonce} {body_sha256} {own}"
    data = request.encrypt(OWN, 404, b"an answer")
    key = mac("specdec reach 2 answer", nonce)
    assert AESGCM(key).decrypt(data[:12], data[12:], b"404") == b"an answer"


@pytest.mark.parametrize("path", [PATH, "/ü/\udcff", "/%C3%BC", "http://p/reach/kept", ""])
def test_a_request_is_verified_with_the_same_secret_method_path_and_header(path: str) -> None:
    request = SignedRequest.new("POST", path, b"body")
    (header,) = authorization(request)
    assert SignedRequest.verified(OWN, "POST", path, [header]) == request, "the control"
    words = header.split(" ")
    changed = [header.replace(word, "21"[word[0] == "2"] + word[1:]) for word in words]
    for method, wanted, headers in (
        ("GET", path, [header]),
        ("POST", f"{path}?", [header]),
        ("POST", path.upper() + "x", [header]),
        ("POST", path, []),
        ("POST", path, [header, header]),
        ("POST", path, [f"{header},{header}"]),
        ("POST", path, [header.lower()]),
        ("POST", path, [f"{header}\n"]),
        ("POST", path, [header.replace(words[1], "١" * 10)]),
        ("POST", path, authorization(request, OTHER)),
        *(("POST", path, [own]) for own in changed),
    ):
        why = reason_of(SignedRequest.verified, OWN, method, wanted, headers)
        assert why == "unauthorized", (method, wanted, headers)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 1 << 16])
def test_an_answer_is_of_one_request_status_salt_body_and_secret(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    request = SignedRequest.new("GET", PATH)
    data = request.encrypt(OWN, 200, body)
    assert request.decrypt(OWN, 200, data) == body, "the control"
    for asked, secret, status, received in (
        (SignedRequest.new("GET", PATH), OWN, 200, data),
        (request, OTHER, 200, data),
        (request, OWN, 404, data),
        (request, OWN, 200, data + b"x"),
        *((request, OWN, 200, data[:length]) for length in (*range(30), len(data) - 1) if length < len(data)),
        *(
            (request, OWN, 200, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            for at in (0, 12, len(data) - 1)
        ),
    ):
        assert asked.decrypt(secret, status, received) is None
    again = request.encrypt(OWN, 200, body)
    assert again[:12] != data[:12] and (size < 63 or again[12:] != data[12:]), "no IV is used twice"
    assert size < 63 or body not in data


def test_an_answer_is_no_request_and_a_lease_is_neither() -> None:
    """One key signs all of them."""
    texts = {purpose: OWN.digest(purpose, "x") for purpose in ("request", "answer", "lease")}
    assert len({*texts.values()}) == 3


@pytest.mark.parametrize("ahead_s", [-MOST_SKEW_S - 1, -MOST_SKEW_S, 0, MOST_SKEW_S, MOST_SKEW_S + 1])
def test_a_request_is_admitted_once_while_its_time_is_valid(ahead_s: int) -> None:
    clock = Clock()
    guard = ReplayGuard(clock, clock)
    request = SignedRequest.new("GET", PATH)._replace(time_s=int(clock.now_s) + ahead_s)
    if abs(ahead_s) > MOST_SKEW_S:
        assert reason_of(guard.admit, request) == "clock_skew"
        return
    guard.admit(request)
    for _ in range(3 * MOST_SKEW_S):
        assert reason_of(guard.admit, request) in ("replayed", "clock_skew")
        clock.now_s += 1
    assert reason_of(guard.admit, request) == "clock_skew"
    guard.admit(request._replace(nonce="0" * 32, time_s=int(clock.now_s)))
    assert len(guard._seen) == 1, "those that are too old are forgotten"


def test_with_too_many_nonces_new_requests_are_refused_and_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signed, "MOST_NONCES", 3)
    clock = Clock()
    guard = ReplayGuard(clock, clock)
    requests = [SignedRequest.new("GET", PATH)._replace(time_s=int(clock.now_s)) for _ in range(4)]
    reasons = [reason_of(guard.admit, own) for own in requests + requests]
    assert reasons == [None, None, None, "busy", "replayed", "replayed", "replayed", "busy"]
    clock.now_s += 2 * MOST_SKEW_S + 2
    guard.admit(requests[3]._replace(time_s=int(clock.now_s)))


def test_requests_without_a_valid_signature_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = []

    class Recorded(ReplayGuard):
        def __init__(self, *own) -> None:
            super().__init__(*own)
            guards.append(self)

    async def test() -> None:
        async with Lender().listening() as lender:
            for _ in range(20):
                request = SignedRequest.new("GET", "/reach/agents")
                status, _ = await lender.call(
                    "GET", "/reach/agents", headers={"Authorization": request.authorization(OTHER)}
                )
                assert status == 401
            (guard,) = guards
            assert len(guard._seen) == 0
            await lender.call("GET", "/reach/agents")
            assert len(guard._seen) == 1, "the control"

    monkeypatch.setattr(channel, "ReplayGuard", Recorded)
    run(test())


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_clocks_that_differ_are_named_on_both_sides(ahead_s: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        lender = Lender(wall_clock=lambda: time.time() - ahead_s)
        async with lender.listening(), reading(lender.port) as (peers, _):
            with pytest.raises(ReachError, match="The clocks of the two servers differ") as caught:
                await peers.connect(lender.room(5), PROMPT)
            assert caught.value.reason == "clock_skew" and "NTP" in str(caught.value)
            assert lender.book.figures.refused == {"clock_skew": 1}
            assert any(
                "clocks" in record.message for record in caplog.records if record.levelname == "WARNING"
            )

    run(test())


class Plain:
    """The mutant: it authenticates responses and does not encrypt them."""

    def __init__(self, request: SignedRequest, secret: Secret) -> None:
        self._cipher = AESGCM(secret.digest("answer", request.nonce))

    def encrypt(self, iv: bytes, data: bytes, status: bytes) -> bytes:
        return data + self._cipher.encrypt(iv, b"", status + data)

    def decrypt(self, iv: bytes, data: bytes, status: bytes) -> bytes:
        data, tag = data[:-16], data[-16:]
        self._cipher.decrypt(iv, tag, status + data)
        return data


class Impostor:
    """An attacker at a server's address that records messages, and relays them if it can."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.relay_to: int | None = None

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", port) as server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            self.sent.append(head + await reader.readexactly(size))
            writer.write(
                b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"intact": true}'
                if self.relay_to is None
                else await self.replay(self.sent[-1], self.relay_to)
            )
        writer.close()

    async def replay(self, data: bytes, port: int) -> bytes:
        """Send a captured message to another server; return its whole response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answer = await reader.read()
        writer.close()
        self.received.append(answer)
        return answer

    def has_read(self, lender: Lender) -> bool:
        """Return whether it can read the response that describes access to a server's memory."""
        return any(lender.engine.encode() in answer for answer in self.received)


@pytest.mark.parametrize("is_mutant", [False, True])
def test_an_impostor_on_a_peers_port_learns_nothing(is_mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capture is replayed to another server and to the restored one; the mutant does not encrypt."""

    async def test() -> None:
        impostor = Impostor()
        async with impostor.listening() as port, reading(port) as (peers, attached):
            with pytest.raises(ReachError, match="does not decrypt"):
                await peers.connect(RoomReference("127.0.0.1", port, 5), PROMPT)
            assert not attached.engines
        (captured,) = impostor.sent
        assert SECRET.encode() not in captured
        async with Lender().listening(port) as returned, Lender().listening() as another:
            for lender in (returned, another):
                assert (await impostor.replay(captured, lender.port)).startswith(b"HTTP/1.1 200")
                assert impostor.has_read(lender) == is_mutant
                again = await impostor.replay(captured, lender.port)
                assert again.startswith(b"HTTP/1.1 401") and lender.book.figures.refused == {"replayed": 1}

    if is_mutant:
        monkeypatch.setattr(SignedRequest, "_cipher", lambda *own: Plain(*own))
    run(test())


@pytest.mark.parametrize("is_mutant", [False, True])
def test_an_impostor_that_relays_to_another_server_cannot_read_its_answers(
    is_mutant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        impostor = Impostor()
        async with (
            Lender().listening() as lender,
            impostor.listening() as port,
            reading(port, beat_s=60) as (peers, attached),
        ):
            impostor.relay_to = lender.port
            reference = lender.reference((await lender.read())[0], port=port)
            pair = await peers.connect(reference, PROMPT)
            assert attached.engines == [lender.engine], "it can only pass on what was said"
            assert impostor.has_read(lender) == is_mutant
            async with Lender().listening() as other, peers.hold(pair, reference, PROMPT) as hold:
                impostor.relay_to = other.port
                with pytest.raises(ReachError) as caught:
                    await peers.open(hold, 0)
                assert caught.value.reason == "other_engine"
                assert other.book.figures.refused == {"other_engine": 1}

    if is_mutant:
        monkeypatch.setattr(SignedRequest, "_cipher", lambda *own: Plain(*own))
    run(test())


def test_a_captured_close_ends_no_lease_a_second_time_nor_with_another_body() -> None:
    async def test() -> None:
        impostor = Impostor()
        async with Lender().listening() as lender:
            (lease, _), reader = await lender.read(), "a" * 32
            assert (await lender.call("POST", f"/reach/leases/{lease.id}/open", lender.ask()))[0] == 200
            path = f"/reach/leases/{lease.id}/close"
            body = f'{{"engine":"{lender.engine}","reader":"{reader}","read":false}}'.encode()
            request = SignedRequest.new("POST", path, body)
            head = f"POST {path} HTTP/1.1\r\nHost: p\r\nAuthorization: {request.authorization(OWN)}\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            for sent, reason in (
                (body.replace(b'read":false', b'read":true '), "unauthorized"),
                (body, "replayed"),
            ):
                answer = await impostor.replay(head.encode() + sent, lender.port)
                top, _, data = answer.partition(b"\r\n\r\n")
                assert top.startswith(b"HTTP/1.1 401")
                assert readable(request, 401, data)["error"]["code"] == reason
            assert not lease.end_reason

    run(test())
