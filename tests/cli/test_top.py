"""The view of a running server: rates between two readings, screens, and the terminal's restoration."""

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec import __version__
from specdec.cli import main
from specdec.cli.top.options import TopOptions
from specdec.cli.top.picture import WIDEST, StyledText, picture, shown
from specdec.cli.top.reading import CounterGrowth, ServerReading, shares
from specdec.cli.top.screen import ENTER, LEAVE, Screen
from specdec.cli.top.view import ServerPoller, TopView
from specdec.http.client import PORT, check_url
from specdec.server.settings import ServerConfig
from tests.cli.test_terminal import CODES, Terminal
from tests.selection import only
from tests.server.live import Live, serving, total

KEY = "given"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
ENV = "SPECDEC_TEST_TOP_KEY"
WAIT_S = 60
MIB = 1 << 20
INFO: Mapping[str, Any] = {
    "version": "1.2",
    "model": "made-up",
    "device": "cpu",
    "dtype": "float32",
    "slots": "record",
    "drafters": ["mtp", "suffix"],
    "running": 3,
    "waiting": 2,
    "max_running": 64,
    "acceptance_length": 2.5,
    "acceptance_by_depth": [0.9, 0.5],
    "limited_by": {"states": 7},
    "steps": 100,
    "tokens": 250,
    "drafted": 400,
    "accepted": 150,
    "preemptions": 1,
    "failed_steps": 0,
    "moved_blocks": 12,
    "layout": {"block_bytes": MIB, "state_bytes": 10 * MIB},
    "arena": {
        "capacity_bytes": 200 * MIB,
        "block_bytes": 20 * MIB,
        "state_bytes": 20 * MIB,
        "record_bytes": 5 * MIB,
        "cached_block_bytes": 30 * MIB,
        "cached_state_bytes": 40 * MIB,
        "free_bytes": 70 * MIB,
    },
    "prefixes": {
        "asked": 1000,
        "hit": 600,
        "fetched": 16,
        "states_cached": 600,
        "states_evicted": 2,
        "blocks_evicted": 9,
        "cached_bytes": 70 * MIB,
    },
}
Capture = pytest.CaptureFixture[str]


def reading(at_s: float = 0.0, **changed: Any) -> ServerReading:
    return ServerReading.of({**INFO, **changed}, at_s)


def lines(now: ServerReading, growth: CounterGrowth | None = None, width: int = WIDEST) -> list[str]:
    return shown(picture(now, growth, width), width=width, coloured=False)


@example([0, 0], 5)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8), st.integers(0, 300))
def test_the_parts_of_a_bar_fill_it(parts: list[int], width: int) -> None:
    cells = shares(parts, width)
    assert sum(cells) == width and min(cells) >= 0
    if whole := sum(parts):
        assert all(abs(c - width * part / whole) <= 1.01 for c, part in zip(cells, parts, strict=True))


def test_cached_blocks_count_once() -> None:
    arena = {name: count // MIB for name, count in reading().arena.items()}
    assert arena == {"KV blocks": 20, "states": 20, "drafts": 5, "prefixes": 70, "holes": 15, "free": 70}
    assert sum(arena.values()) * MIB == INFO["arena"]["capacity_bytes"]
    kept = reading().prefixes
    assert kept and (kept.states, kept.blocks) == (4, 30)
    text = "\n".join(lines(reading()))
    assert "states: 4 cached, 2 evicted" in text and "blocks: 30 cached, 9 evicted" in text
    layout = {"block_bytes": MIB, "state_bytes": 0}
    arena = {**INFO["arena"], "cached_state_bytes": 0}
    kept = reading(layout=layout, arena=arena).prefixes
    assert kept and (kept.states, kept.blocks) == (0, 30)


@given(*[st.integers(0, 300)] * 5)
def test_readings_that_do_not_fit_together_have_no_negative_part(
    blocks: int, states: int, free: int, kept_blocks: int, kept_states: int
) -> None:
    """The server steps while it counts."""
    arena = {"block_bytes": blocks, "state_bytes": states, "free_bytes": free}
    arena |= {"cached_block_bytes": kept_blocks, "cached_state_bytes": kept_states}
    now = reading(arena={**INFO["arena"], **{name: count * MIB for name, count in arena.items()}})
    assert min(now.arena.values()) >= 0
    assert sum(now.arena.values()) >= INFO["arena"]["capacity_bytes"]


def test_rates_are_differences_between_polls() -> None:
    before = reading(10.0)
    kept = {**INFO["prefixes"], "asked": 1100, "hit": 690}
    changed = {"steps": 120, "tokens": 350, "drafted": 480, "accepted": 230, "limited_by": {"states": 12}}
    now = reading(12.0, **changed, prefixes=kept)
    text = "\n".join(lines(now, CounterGrowth.between(before, now)))
    assert "50.0 tokens/s" in text and "5.00 tokens per step now, 2.50 overall" in text
    assert "100% of draft tokens now, 48% overall" in text
    assert "states 5 now, states 12 overall" in text
    assert "90% of prompt tokens cached now, 63% overall" in text


def test_without_a_reading_before_nothing_is_known_of_now() -> None:
    text = "\n".join(lines(reading()))
    assert "- tokens/s" in text and "- tokens per step now, 2.50 overall" in text
    assert "- now, states 7 overall" in text and "- of prompt tokens cached now, 60% overall" in text


@pytest.mark.parametrize("counted", [{"steps": 4, "tokens": 10}, {"limited_by": {}}, {"prefixes": None}])
def test_counters_of_a_restarted_server_count_from_zero(counted: dict[str, Any]) -> None:
    now = reading(1.0, **counted)
    growth = CounterGrowth.between(reading(), now)
    assert growth.counts == now.counts and growth.limited_by == now.limited_by
    assert min(growth.counts.values()) >= 0


def test_rates_restart_after_an_outage() -> None:
    source = Scripted([reading(1.0), reading(2.0), TimeoutError(), reading(4.0), reading(5.0)])
    view, seen = TopView(cast(ServerPoller, source), Screen()), []
    for _ in range(5):
        asyncio.run(view.look())
        seen.append((view.growth and view.growth.seconds, view.trouble))
    away = (None, "TimeoutError(); retrying")
    assert seen == [(None, None), (1.0, None), away, (None, None), (1.0, None)]


class Scripted:
    """A terminal stub with scripted responses."""

    why = staticmethod(repr)

    def __init__(self, says: list[ServerReading | Exception]) -> None:
        self.says = iter(says)

    async def read(self) -> ServerReading:
        match next(self.says):
            case ServerReading() as now:
                return now
            case error:
                raise error


@pytest.mark.parametrize("width", [1, 12, 19, 20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    now = reading(model="m" * 300)
    plain = lines(now, CounterGrowth.between(reading(-1.0), now), width)
    assert max(map(len, plain)) <= width
    coloured = shown(
        picture(now, CounterGrowth.between(reading(-1.0), now), width), width=width, coloured=True
    )
    assert [CODES.sub("", line) for line in coloured] == plain != coloured
    assert not any("\x1b" in line for line in plain)


def test_the_bar_has_a_cell_for_each_part_and_ends_where_lines_do() -> None:
    (bar,) = [line for line in lines(reading()) if line.startswith("arena")]
    assert len(bar) == WIDEST
    cells = {letter: bar.split()[1].count(letter) for letter in "KSDPH."}
    assert cells == {"K": 7, "S": 8, "D": 1, "P": 26, "H": 5, ".": 26}


def test_alpha_is_shown_if_reported() -> None:
    assert "alpha" not in "\n".join(lines(reading()))
    assert "alpha 0.25" in "\n".join(lines(reading(prefixes={**INFO["prefixes"], "alpha": 0.25})))


def test_the_drafting_decision_is_shown_and_wrapped() -> None:
    assert "drafting   -" in lines(reading())
    why = "drafting is off: a chain of 2 would give 1.10 tokens per step, at 1.30 x the time of a step"
    drawn = lines(reading(speculation={"name": "none", "reason": why}), width=40)
    at = next(i for i, line in enumerate(drawn) if line.startswith("drafting "))
    said = [line[11:] for line in drawn[at : at + 5]]
    assert " ".join(said).startswith(why) and max(map(len, drawn)) <= 40


def test_control_characters_from_a_server_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    (line,) = shown([[StyledText("a\x1b[2J\nb\tc\r")]], width=None, coloured=True)
    assert line == "a\\x1b[2J b c\\x0d"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--prefix-cache", "--dtype", "float32", "--api-key", KEY, "--draft", "suffix")


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_once_prints_one_picture(
    live: Live, path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, KEY)
    body = {"prompt": "import os\n" * 30, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert live.ask("/v1/completions", body, **WITH_KEY).status == 200
    options = ["--once", "--interval", "0.05", "--api-key-env", ENV]
    if path:
        options[3:] = ["--api-key", KEY]
    assert main(["top", live.url + path, *options]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and text.startswith(f"tiny at {live.url}, polled for 0:00:0")
    assert f"specdec {__version__} on cpu in float32, record slots, drafters: suffix" in text
    assert "0 running (max " in text and "0.0 tokens/s" in text
    info, metrics = live.ask("/server_info", **WITH_KEY).json, live.metrics()
    assert info["tokens"] == total(metrics, "specdec:step_tokens_total") >= 39
    assert info["drafted"] == total(metrics, "vllm:spec_decode_num_draft_tokens_total") > 0
    assert info["accepted"] == total(metrics, "vllm:spec_decode_num_accepted_tokens_total")
    assert info["moved_blocks"] == total(metrics, "specdec:moved_blocks_total")
    kept = info["prefixes"]
    assert kept["asked"] == total(metrics, "vllm:prefix_cache_queries_total") > 0
    assert f"- of prompt tokens cached now, {kept['hit'] / kept['asked']:.0%} overall" in text
    assert f"{info['acceptance_length']:.2f} overall" in text


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9", "no server at http://127.0.0.1:9; start one with `specdec serve MODEL`"),
        ("LIVE", "give --api-key, or --api-key-env"),
        ("LIVE/nowhere", "the key is missing or invalid"),
        ("ftp://nonsense", "url: 'ftp://nonsense' is not the address of a server"),
        ("9", "no server at http://127.0.0.1:9; start"),
        ("127.0.0.1:9/v1", "no server at http://127.0.0.1:9; start"),
        *(
            (url, f"url: {url!r} is not the address of a server")
            for url in ("99999", "::1", "http://9", "x:y")
        ),
    ],
)
def test_a_wrong_address_is_one_line(live: Live, url: str, says: str, capsys: Capture) -> None:
    assert main(["top", url.replace("LIVE", live.url), "--once"]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        *((typed, "http://127.0.0.1:9") for typed in ("9", ":9", "127.0.0.1:9", "http://127.0.0.1:9/v1/")),
        *((typed, f"http://{typed}:8000") for typed in ("127.0.0.1", "localhost", "[::1]")),
        *((typed, typed) for typed in ("http://localhost", "https://localhost")),
    ],
)
def test_an_address_is_a_url_a_host_or_a_port(typed: str, url: str) -> None:
    assert check_url(typed) == url
    assert ServerConfig.model_fields["port"].default == PORT
    assert TopOptions.model_fields["url"].default == check_url(str(PORT))


def test_a_variable_that_is_not_set_is_named(capsys: Capture) -> None:
    assert main(["top", "--api-key-env", "SPECDEC_TEST_NO_SUCH"]) == 2
    assert "SPECDEC_TEST_NO_SUCH" in capsys.readouterr().err
    assert main(["top", "--api-key-env", ENV, "--api-key", KEY]) == 2
    assert "give one of them" in capsys.readouterr().err


class Watched:
    """`specdec top` in a terminal."""

    def __init__(self, *options: str, **env: str) -> None:
        self.ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        self.resize(100, 40)
        self.text = ""
        command = [sys.executable, "-m", "specdec.cli", "top", *options, "--interval", "0.1"]
        ends = {"stdin": self.theirs, "stdout": self.theirs, "stderr": self.theirs}
        self.process = subprocess.Popen(
            command, **ends, env={**os.environ, "TERM": "xterm", **env}, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def see(self, text: str) -> str:
        """Wait for a text; return all output since the call."""
        self.text = ""
        until_s = time.monotonic() + WAIT_S
        while text not in self.text:
            assert self.process.poll() is None and time.monotonic() < until_s, self.text
            self._read()
        return self.text

    def end(self) -> str:
        """Wait for its end; return its last output."""
        self.text = ""
        until_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < until_s, self.text
            self._read()
        self._read()
        assert self.process.returncode == 0, self.text
        assert termios.tcgetattr(self.theirs) == self.before
        assert self.text.endswith(LEAVE)
        return self.text

    def _read(self) -> None:
        while select.select([self.ours], [], [], 0.1)[0]:
            self.text += os.read(self.ours, 1 << 16).decode()


def test_a_terminal_is_redrawn_in_place_until_q_and_restored(live: Live) -> None:
    with Watched(live.url, "--api-key-env", ENV, **{ENV: KEY, "NO_COLOR": ""}) as watched:
        text = watched.see("q or Ctrl-C quits")
        assert ENTER in text and "\x1b[1mtiny" in text
        assert termios.tcgetattr(watched.theirs) != watched.before
        watched.resize(30, 6)
        watched.see("tiny")
        watched.see("tiny")
        frames = re.split(re.escape("\x1b[H"), watched.see("requests") + watched.see("tiny"))[1:-1]
        drawn = [re.sub(r"\x1b\[\w*", "", line) for frame in frames for line in frame.splitlines()]
        assert 20 < max(map(len, drawn)) <= 30
        assert all(frame.count("\n") == 5 for frame in frames)
        live.process.send_signal(signal.SIGSTOP)  # quitting must not wait for the server
        try:
            os.write(watched.ours, b"q")
            watched.end()
        finally:
            live.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("number", only({signal.SIGINT}, [signal.SIGINT, signal.SIGTERM]))
def test_a_server_that_is_away_is_waited_for(number: int) -> None:
    with Live("--draft", "none") as live, Watched(live.url, NO_COLOR="1") as watched:
        text = watched.see("q or Ctrl-C quits")
        assert not CODES.search(text) and "tiny at" in text
        live.stop()
        text = watched.see("`specdec serve MODEL`; retrying")
        text = watched.see("q or Ctrl-C")
        assert text.index("the figures below are 0:00:") < text.index("running (max")
        watched.process.send_signal(number)
        watched.end()
