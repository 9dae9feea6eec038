"""A hub on loopback: the part of the Hugging Face hub's protocol that downloads use."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = 1 << 17
"""File size from which a file is stored separately, as with Git LFS: its address redirects to another host.
"""


@lru_cache(maxsize=64)
def _digest(content: bytes) -> bytes:
    return hashlib.sha1(content).digest()


@dataclass
class Repo:
    """One model: its files, access rules and injected faults."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By file: byte counts after which successive connections break."""
    stalls: set[str] = field(default_factory=set)
    """Files whose connections stall halfway."""
    trickles: set[str] = field(default_factory=set)
    """Files that are sent one byte at a time."""
    swaps: dict[str, bytes] = field(default_factory=dict)
    """By file: content sent in place of the real one."""
    spans: dict[str, list[str]] = field(default_factory=dict)
    """By file: ranges sent in place of successive requested ones."""

    told: str | None = None
    """Commit to report for files, in place of the repository's."""

    @property
    def commit(self) -> str:
        parts = (name.encode() + _digest(content) for name, content in sorted(self.files.items()))
        return hashlib.sha1(b"".join(parts)).hexdigest()

    @classmethod
    def of(cls, folder: Path, **more: bytes) -> "Repo":
        return cls(
            {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} | more
        )


@dataclass
class Hub:
    """Serve repositories and record requests."""

    address: str
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method and subject (`api` or a file) and range of each request."""
    garbage: bool = False
    info: bytes | None = None
    """Repository description to send in place of the real one."""
    status: int | None = None
    sent: int = 0
    """File bytes sent."""
    going: threading.Event = field(default_factory=threading.Event)
    """Set while a connection stalls."""
    ended: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> list[str]:
        """List the requested files."""
        return sorted(file for method, file, _ in self.asked if method == "GET" and file != "api")


@contextmanager
def serve() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.garbage:
            return self._send(
                200, b"<html>Please log in to this network</html>", {"Content-Type": "text/html"}
            )
        if self.hub.status:
            return self._refuse(self.hub.status)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            return self._describe(*found.groups())
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            assert "authorization" not in self.headers, "a token must not leave the hub"
            return self._content(self.hub.repos[found[1]], found[2])
        self._refuse(404)

    def _repo(self, name: str, revision: str) -> Repo | None:
        """Return a repository, or refuse as the hub does: a private one looks missing."""
        repo, sent = self.hub.repos.get(name), self.headers.get("authorization")
        if repo is None or (repo.token and sent != f"Bearer {repo.token}" and not repo.gated):
            self._refuse(404 if sent else 401, "RepoNotFound")
        elif repo.gated and sent != f"Bearer {repo.token}":
            self._refuse(403 if sent else 401, "GatedRepo")
        elif revision not in ("main", "v1", "refs/pr/1", repo.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _describe(self, name: str, revision: str) -> None:
        self.hub.asked.append((self.command, "api", ""))
        if repo := self._repo(name, revision):
            siblings = [{"rfilename": file} for file in repo.files]
            body = {"id": name, "modelId": name, "sha": repo.commit, "private": False, "siblings": siblings}
            info = self.hub.info or json.dumps(body).encode()
            self._send(200, info, {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return None
        if file not in repo.files:
            return self._refuse(404, "EntryNotFound")
        content, commit = repo.files[file], {"X-Repo-Commit": repo.told or repo.commit}
        if len(content) >= LARGE:
            # Another name of this machine, because the hub's storage is another host.
            place = f"{self.hub.address.replace('127.0.0.1', 'localhost')}/cdn/{name}/{file}"
            digest = hashlib.sha256(content).hexdigest()
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            return self._send(302, b"", {**commit, **linked, "Location": place})
        etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return self._content(repo, file, {**commit, "ETag": f'"{etag}"'})

    def _content(self, repo: Repo, file: str, headers: Mapping[str, str] | None = None) -> None:
        content, wanted = repo.swaps.get(file, repo.files[file]), self.headers.get("range", "")
        self.hub.asked.append((self.command, file, wanted))
        if self.command == "GET" and repo.spans.get(file):
            wanted = repo.spans[file].pop(0)
        start, _, stop = wanted.removeprefix("bytes=").partition("-")
        first, last = int(start or 0), min(int(stop or len(content) - 1), len(content) - 1)
        span = {"Content-Range": f"bytes {first}-{last}/{len(content)}"} if wanted else {}
        self._send(206 if wanted else 200, content[first : last + 1], {**(headers or {}), **span}, repo, file)

    def _refuse(self, status: int, code: str = "") -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], repo: Repo | None = None, file: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if repo and repo.cuts.get(file):
            body, self.close_connection = body[: repo.cuts[file].pop(0)], True
        if repo and file in repo.trickles:
            return self._trickle(body)
        stalls = repo is not None and file in repo.stalls
        self.wfile.write(body[: len(body) // 2] if stalls else body)
        self.hub.sent += len(body) if repo else 0
        if stalls:
            self.wfile.flush()
            self.hub.going.set()
            self.hub.ended.wait()
            self.close_connection = True

    def _trickle(self, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            for byte in body:
                self.wfile.write(bytes([byte]))
                if self.hub.ended.wait(0.002):
                    break
        self.close_connection = True
