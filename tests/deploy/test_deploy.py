"""deploy/ fits the server: the dashboard its metrics, the unit and the containers its options."""

import asyncio
import contextlib
import gc
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from aiohttp import web

from specdec.cli import _parser
from specdec.config.engine import EngineConfig
from specdec.config.file import fill_in
from specdec.config.parser import USER_ERROR
from specdec.errors import ConfigError
from specdec.server import run, streams, tls
from specdec.server.connections import Connections
from specdec.server.listen import TLS_READ_BYTES, bind, listen
from specdec.server.settings import ServerConfig
from specdec.server.tls import tls_context
from tests.deploy.promql import faults, labels_of, types_of
from tests.server.live import Live

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ASK = {
    "prompt": [f"{end}def f(x):\n    return x\n" * 4 for end in "abc"],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for 127.0.0.1, its key, that key encrypted, and another key."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    for words in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        "ecparam -name prime256v1 -genkey -noout -out other.pem",
        "ec -in key.pem -aes256 -passout pass:secret -out locked.pem",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def told() -> Iterator[socket.socket]:
    """Listen as systemd does, on an abstract socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(b"\0specdec-test-" + str(id(sock)).encode())
        sock.settimeout(10)
        yield sock


@pytest.fixture(scope="module")
def live(certificates: Path, told: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serve with a settings file, over TLS, watched by a supervisor, with the unit's caches."""
    lines = {
        **{"ssl-certfile": str(certificates / "cert.pem"), "ssl-keyfile": str(certificates / "locked.pem")},
        **{"ssl-keyfile-password": "secret", "memory-bytes": "64MiB", "draft": "suffix", "adaptive": False},
        "max-num-seqs": 2,  # fewer than requested, so that the limit is reached
    }
    path = tmp_path_factory.mktemp("settings") / "specdec.yaml"
    path.write_text(yaml.safe_dump(lines))
    trust = ssl.create_default_context(cafile=certificates / "cert.pem")
    notify = told.getsockname().decode().replace("\0", "@", 1)
    with Live("--config", str(path), env={"NOTIFY_SOCKET": notify}, tls=trust) as own:
        yield own


def queries() -> Iterator[tuple[str, str, str]]:
    dashboard = json.loads((DEPLOY / "grafana" / "specdec.json").read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def test_a_server_over_tls_answers_and_notifies_its_supervisor(live: Live, told: socket.socket) -> None:
    assert live.url.startswith("https://")
    assert told.recv(64) == b"READY=1"
    assert live.ask("/v1/completions", ASK | {"stream": True}).events[-1]["choices"][0]["finish_reason"]
    with pytest.raises((OSError, ConnectionError)):  # a client that does not trust the certificate
        Live.ask(_over(live, ssl.create_default_context()), "/health")
    plain = _over(live, None)
    plain.url = live.url.replace("https:", "http:")
    for _ in range(3):
        with pytest.raises((OSError, ConnectionError)):
            plain.ask("/health")
    assert live.ask("/health").status == 200
    told = [line for line in live.said if "plain HTTP" in line]
    assert len(told) == 1 and "https://" in told[0]


def _over(live: Live, tls: ssl.SSLContext | None) -> Live:
    other = Live(tls=tls)
    other.url = live.url
    return other


def test_the_dashboard_queries_existing_metrics(live: Live) -> None:
    assert live.ask("/v1/completions", ASK).status == 200
    text = live.ask("/metrics").data.decode()
    labels, types = labels_of(text), types_of(text)
    asked = list(queries())
    assert len(asked) > 30
    wrong = {
        title: found for title, query, legend in asked if (found := faults(query, labels, types, legend))
    }
    assert not wrong
    told = {name for _, query, _ in asked for name in re.findall(r"(?:vllm|specdec):\w+", query)}
    for part in (
        "arena_bytes",
        "step_seconds",
        "num_accepted_tokens_per_pos",
        "prefix_cache_hits",
        "limited",
    ):
        assert any(part in name for name in told), part

    def mutant(old: str, new: str) -> list[str]:
        query, legend = next((query, legend) for _, query, legend in asked if old in query)
        assert not faults(query, labels, types, legend)
        return faults(query.replace(old, new), labels, types, legend)

    for old, new in (
        ("specdec:steps_total", "specdec:step_total"),
        ("model_name=~", "model=~"),
        ("by (kind)", "by (sort)"),
        ("by (phase)", "by (le)"),
        ("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
        ("sum by (le)", "sum"),
        ("vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running"),
        ("rate(vllm:generation_tokens_total", "rate(vllm:num_requests_running"),
        ("histogram_quantile(", "histogram_quantil("),
    ):
        assert mutant(old, new), (old, new)


def test_a_certificate_is_read_before_the_model(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SpecEngine", None)
    cert, key, locked, other = (
        str(certificates / f"{name}.pem") for name in ("cert", "key", "locked", "other")
    )
    for given, field, says in (
        ({"ssl_certfile": "/no/such"}, "ssl_certfile", "/no/such cannot be read (No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": "/no/such"}, "ssl_keyfile", "cannot be read"),
        ({"ssl_keyfile": key}, "ssl_keyfile", "give --ssl-certfile too"),
        ({"ssl_certfile": cert}, "ssl_keyfile", "has no private key"),
        ({"ssl_certfile": key, "ssl_keyfile": key}, "ssl_certfile", "has no certificate"),
        ({"ssl_certfile": cert, "ssl_keyfile": other}, "ssl_keyfile", "does not match the certificate"),
        ({"ssl_certfile": cert, "ssl_keyfile": locked}, "ssl_keyfile_password", "is missing"),
        (
            {"ssl_certfile": cert, "ssl_keyfile": locked, "ssl_keyfile_password": "wrong"},
            "ssl_keyfile_password",
            "does not open",
        ),
    ):
        with bind("127.0.0.1", 0) as sock, pytest.raises(ConfigError) as caught:
            run.run("tiny", EngineConfig(), ServerConfig(**given), sock)
        assert caught.value.field == field and says in str(caught.value)
        assert str(caught.value).startswith(f"{field}: ")
    assert tls_context(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    assert tls_context(ServerConfig()) is None


def test_a_connection_without_a_handshake_has_a_small_buffer(certificates: Path) -> None:
    """Anyone may open thousands; data of any length still arrives complete."""
    sent = bytes(range(256)) * 4096
    made: list[asyncio.BaseProtocol] = []

    class Counting(asyncio.Protocol):
        def __init__(self) -> None:
            self.received = bytearray()
            made.append(self)

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.received += data
            if len(self.received) == len(sent):
                self.transport.write(b"1" if self.received == sent else b"0")

    async def test() -> None:
        files = {f"ssl_{name}file": str(certificates / f"{name}.pem") for name in ("cert", "key")}
        server, _ = await listen(Counting, bind("127.0.0.1", 0), tls_context(ServerConfig(**files)))
        async with server:
            host, port = server.sockets[0].getsockname()
            _, silent = await asyncio.open_connection(host, port)
            while not made:
                await asyncio.sleep(0.001)
            buffers = [len(own._ssl_buffer) for own in gc.get_objects() if type(own) is SSLProtocol]
            assert buffers and max(buffers) <= TLS_READ_BYTES
            context = ssl.create_default_context(cafile=files["ssl_certfile"])
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(sent)
            assert await reader.readexactly(1) == b"1"
            for own in (silent, writer):
                own.close()
                with contextlib.suppress(OSError):
                    await own.wait_closed()
            await asyncio.sleep(0.05)  # the server's side

    before = SSLProtocol.max_size
    assert before > TLS_READ_BYTES, "the control"
    try:
        asyncio.run(test())
    finally:
        SSLProtocol.max_size = before


@pytest.mark.parametrize("checked", [True, False])
def test_pending_requests_of_a_tls_client_are_detected(
    certificates: Path, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asyncio drops what is written to it, and reports nothing while these requests wait."""
    if not checked:
        monkeypatch.setattr(streams, "_check_client", lambda transport: None)

    async def test() -> bool:
        left, ended = asyncio.Event(), asyncio.get_running_loop().create_future()
        begun = list[asyncio.Transport]()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await left.wait()
            assert request.transport
            begun.append(request.transport)
            await asyncio.sleep(0.2)  # the server's side
            try:
                async with streams.read_within(cast(web.Request, request), 60.0):
                    await response.write(b"x")
            except ConnectionError:
                ended.set_result(True)
                raise
            if not ended.done():
                ended.set_result(False)
            return response

        files = {f"ssl_{name}file": str(certificates / f"{name}.pem") for name in ("cert", "key")}
        server = web.Server(handle)
        factory = Connections(None, 60.0).factory(server)
        listener, _ = await listen(factory, bind("127.0.0.1", 0), tls_context(ServerConfig(**files)))
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname()[:2], ssl=context)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 8)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.get_extra_info("socket")._sock.shutdown(socket.SHUT_WR)  # without close_notify
        left.set()
        found: bool = await asyncio.wait_for(ended, 30)
        for own in (writer.transport, *begun):
            own.abort()
        listener.close()
        await server.shutdown(1)
        await asyncio.sleep(0.05)  # the client's side
        return found

    before = SSLProtocol.max_size
    try:
        assert asyncio.run(test()) == checked
    finally:
        SSLProtocol.max_size = before


def read(words: list[str]) -> Any:
    args = _parser().parse_args(words)
    fill_in(args, ServerConfig, EngineConfig)
    return args


def test_the_unit_starts_an_existing_command_and_writes_to_allowed_paths() -> None:
    lines = (DEPLOY / "specdec.service").read_text("utf-8").splitlines()
    unit = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    program, *words = unit["ExecStart"].split()
    words[words.index("--config") + 1] = str(DEPLOY / "specdec.yaml")
    assert program.endswith("/bin/specdec") and read(words).model == "tiny"
    assert unit["Type"] == "notify" and unit["Restart"] == "on-failure"
    assert unit["RestartPreventExitStatus"] == str(USER_ERROR) != str(run.FAILED)
    assert float(unit["TimeoutStopSec"].rstrip("s")) >= ServerConfig().drain_seconds + run.GRACE_S
    home = f"%C/{unit['CacheDirectory']}"
    paths = dict(word.split("=") for word in unit["Environment"].split())
    assert all(paths[name].startswith(home) for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))


def test_the_compose_file_names_files_and_options_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else True, volume
            assert source.startswith(("./", "${")) or source in compose["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    server = compose["services"]["specdec"]
    words = [str(DEPLOY / "specdec.yaml") if "/etc/" in word else word for word in server["command"]]
    assert read(words).host == "0.0.0.0"
    targets = re.findall(r"^FROM .* AS (\w+)$", (DEPLOY / "Containerfile").read_text("utf-8"), re.MULTILINE)
    assert {"cpu", "cuda"} <= {*targets} and "cpu" in server["build"]["target"]
    for name in ("prometheus.yaml", "grafana/datasource.yaml", "grafana/provider.yaml"):
        assert yaml.safe_load((DEPLOY / name).read_text("utf-8"))
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text("utf-8"))["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["specdec:8000"]


def test_the_container_copies_the_wheels_sources() -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "specdec"} == {*copied}


def decrypted(context: ssl.SSLContext, records: Sequence[bytes]) -> int:
    """Send records to a server's TLS in memory; return how many bytes it decrypts."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl._create_unverified_context().wrap_bio(to_client, to_server, server_hostname="a")
    server, done = context.wrap_bio(to_server, to_client, server_side=True), set[ssl.SSLObject]()
    while len(done) < 2:
        for own in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                own.do_handshake()
                done.add(own)
    for record in records:
        client.write(record)
    total = 0
    with contextlib.suppress(ssl.SSLWantReadError):
        while True:
            total += len(server.read(1 << 16))
    return total


@pytest.mark.parametrize("is_bounded", [True, False])
def test_tls_records_may_take_little_time_without_data(
    certificates: Path, is_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyUpdate messages, 45 us each, halted all streams; one-byte records simulate them."""
    context = tls_context(
        ServerConfig(**{f"ssl_{own}file": str(certificates / f"{own}.pem") for own in ("cert", "key")})
    )
    assert context
    assert decrypted(context, [bytes(1 << 14)] * 300) == 300 << 14
    assert decrypted(context, [bytes(100)] * 20_000) == 2_000_000
    monkeypatch.setattr(tls, "ALLOWED_PER_BYTE_S", 0.0)
    if is_bounded:
        with pytest.raises(ssl.SSLError, match="too much time for little data"):
            decrypted(context, [b"x"] * 50_000)
    else:
        monkeypatch.setattr(tls._TlsSession, "_take_time", lambda self: None)
        assert decrypted(context, [b"x"] * 50_000) == 50_000


def test_a_pause_while_a_piece_is_decrypted_ends_no_tls_connection(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run then, for a tenth of a second."""
    context = tls_context(
        ServerConfig(**{f"ssl_{own}file": str(certificates / f"{own}.pem") for own in ("cert", "key")})
    )
    assert context
    own, pauses = tls._TlsSession.read, [0.1]

    def paused(self: tls._TlsSession, *args: Any) -> Any:
        found = own(self, *args)
        end_s = time.thread_time() + (pauses.pop() if pauses else 0.0)
        while time.thread_time() < end_s:
            pass
        return found

    monkeypatch.setattr(tls._TlsSession, "read", paused)
    assert decrypted(context, [bytes(100)] * 200) == 20_000 and not pauses
