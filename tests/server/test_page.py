"""The playground's files, as served."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.server.page import playground
from tests.server.live import Live, serving

WEB = Path(__file__).parents[2] / "specdec" / "server" / "web"
VENDOR = WEB / "vendor"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--draft", "none", "--api-key", "given")


def test_the_page_and_its_files_need_no_key_and_load_nothing_from_elsewhere(live: Live) -> None:
    page = live.ask("/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert policy.endswith("require-trusted-types-for 'script'; trusted-types 'none'")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.data.decode())
    assert len(named) > 4
    for path in {f"/{own}" for own in named} | {f"/web/{file.name}" for file in WEB.glob("*.*")}:
        if path.endswith("index.html"):
            continue
        answer = live.ask(path)
        assert answer.status == 200 and answer.headers["Content-Security-Policy"] == policy, path
        assert live.ask(path, If_None_Match=answer.headers["Etag"]).status == 304
        addresses = re.findall(rb"https?://[^\s\"'`)]+", answer.data)
        assert {*addresses} <= {b"http://www.w3.org/2000/svg"}, path
    assert live.ask("/docs").status == 200 and live.ask("/version").status == 200
    assert live.ask("/web/nothing.js").status == 401 and live.ask("/server_info").status == 401


def test_only_known_kinds_of_files_ship(tmp_path: Path) -> None:
    shipped = {file.relative_to(WEB).as_posix() for file in WEB.rglob("*") if file.is_file()}
    assert set(playground(WEB)) == {"/", *(f"/web/{name}" for name in shipped - {"index.html"})}
    for name in ("index.html", ".main.js.swp", "font.woff2", "README"):
        (tmp_path / name).write_bytes(b"x")
    assert set(playground(tmp_path)) == {"/"}  # other files do not keep a server from starting
    assert not any("innerHTML" in file.read_text("utf-8") for file in WEB.glob("*.js"))
    assert max(len(file.read_text("utf-8").splitlines()) for file in WEB.glob("*.*")) < 400


def test_third_party_files_are_unchanged_and_licensed() -> None:
    said = (VENDOR / "VERSIONS.txt").read_text("utf-8")
    named = dict(reversed(line.split()) for line in said.splitlines() if re.match(r"[0-9a-f]{64} ", line))
    assert (
        {*named}
        == {"marked.js", "marked.LICENSE.txt"}
        == {f.name for f in VENDOR.iterdir()} - {"VERSIONS.txt"}
    )
    for name, digest in named.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
    assert f"marked v{said.split()[1]}" in (VENDOR / "marked.js").read_text("utf-8")
    assert "Permission is hereby granted" in (VENDOR / "marked.LICENSE.txt").read_text("utf-8")
