"""A completion in the terminal: escaped text, its figures, and the text before Ctrl-C."""

import io
import json
import re
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from specdec import Delta, RequestStats, SamplingParams, SpecEngine
from specdec.cli import main
from specdec.cli.terminal import LEGEND, figures, print_choices, stream_text
from specdec.cli.text import ACCEPTED, PLAIN, visible

PROMPT = "def f():"
CODES = re.compile(r"\x1b\[\d+m")
DRAFTED = [
    *("--prompt-ids", "5 6", "--temperature", "0", "--max-tokens", "7", "--ignore-eos", "--draft", "mtp"),
    *("--synthetic-acceptance", "1,1,0", "--num-steps", "3", "--no-adaptive"),
]
"""The first token is from prefill, then twice two draft tokens and a bonus token."""
Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def agreeing(folder: Path) -> Path:
    return folder


@pytest.fixture(scope="module")
def engine(hybrid: Path) -> Iterator[SpecEngine]:
    with SpecEngine(hybrid) as engine:
        yield engine


def test_control_characters_are_shown_and_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\r\x07\x7f\x9bc\té 🎉\n"
    assert visible(text) == text
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert visible(text) == "a\\x1b[2Jb\\x0d\\x07\\x7f\\x9bc\té 🎉\n"


@pytest.mark.parametrize("n", [1, 2])
def test_output_is_escaped_for_a_terminal_and_raw_in_a_pipe(
    n: int, engine: SpecEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.tokenizer
    (escape,) = engine.tokenizer.encode("\x1b")
    params = SamplingParams(max_tokens=3, temperature=0.1, logit_bias={escape: 100.0}, n=n)
    monkeypatch.setenv("NO_COLOR", "1")
    for stream, expected in ((Terminal(), "\\x1b" * 3), (io.StringIO(), "\x1b" * 3)):
        monkeypatch.setattr(sys, "stdout", stream)
        if n == 1:
            stream_text(engine, PROMPT, params)
        else:
            print_choices(engine, PROMPT, params, as_json=False)
        assert stream.getvalue().count(expected) == n
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_choices(engine, PROMPT, params, as_json=True)
    assert [json.loads(line)["text"] for line in terminal.getvalue().splitlines()] == ["\x1b" * 3] * n


@pytest.mark.parametrize(
    ("colour", "no_color", "terminal", "expected"),
    [
        ("auto", "", True, True),
        ("auto", "1", True, False),
        ("auto", "", False, False),
        ("always", "1", False, True),
        ("never", "", True, False),
    ],
)
def test_accepted_tokens_are_coloured_on_colour_terminals(
    colour: str,
    no_color: str,
    terminal: bool,
    expected: bool,
    agreeing: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["generate", str(agreeing), *DRAFTED, "--colour", colour]) == 0
    # The first token, then twice two draft tokens and a bonus token.
    plain = CODES.sub("", out.getvalue())
    a, b, c, d, e, f, g = plain.strip()
    marked = f"{a}{ACCEPTED}{b}{c}{PLAIN}{d}{ACCEPTED}{e}{f}{PLAIN}{g}\n"
    assert CODES.sub("", painted_whole(out.getvalue())) == plain
    assert painted_whole(out.getvalue()) == (marked if expected else plain)
    assert (LEGEND in capsys.readouterr().err) == expected


def painted_whole(text: str) -> str:
    """Drop codes without effect, as between two deltas."""
    return text.replace(f"{PLAIN}{ACCEPTED}", "")


def test_choices_have_colours_and_json_has_none(agreeing: Path, capsys: Capture) -> None:
    argv = ["generate", str(agreeing), *DRAFTED, "--temperature", "1", "--n", "2", "--seed", "3"]
    assert main([*argv, "--colour", "always"]) == 0
    assert capsys.readouterr().out.count(ACCEPTED) >= 3
    assert main([*argv, "--json"]) == 0
    choices = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [choice["origins"] for choice in choices] == [[0, 1, 2, 0, 1, 2, 0]] * 2
    assert not any(ACCEPTED in choice["text"] for choice in choices)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C after the twelfth delta of any stream."""
    right = SpecEngine.stream

    async def stream(self: SpecEngine, *given: object) -> AsyncGenerator[Delta, None]:
        count = 0
        async for delta in right(self, *given):  # type: ignore[arg-type]
            yield delta
            count += 1
            if count == 12:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpecEngine, "stream", stream)


LONG = ["--prompt", PROMPT, "--max-tokens", "300", "--ignore-eos", "--seed", "3", "--draft", "none"]


@pytest.mark.usefixtures("interrupted")
def test_interrupt_prints_the_partial_text_of_each_choice(hybrid: Path, capsys: Capture) -> None:
    assert main(["generate", str(hybrid), *LONG, "--n", "2", "--json"]) == 130
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    choices = [json.loads(line) for line in captured.out.splitlines()]
    assert [choice["index"] for choice in choices] == [0, 1]
    # The event loop handles the interrupt at its next turn; a delta or two may precede that.
    assert 12 <= sum(len(choice["token_ids"]) for choice in choices) < 600
    with SpecEngine(hybrid) as engine:
        assert engine.tokenizer
        for choice in choices:
            assert choice["finish_reason"] == "abort"
            assert choice["prompt_token_ids"] == engine.tokenizer.encode(PROMPT)
            assert choice["stats"] is None, "they come with a choice's end, and it has not come"
            whole = engine.tokenizer.decode(choice["token_ids"])
            assert choice["text"] and whole.startswith(choice["text"])


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("more", [[], ["--n", "2"]])
def test_interrupted_text_ends_its_line(more: list[str], hybrid: Path, capsys: Capture) -> None:
    assert main(["generate", str(hybrid), *LONG, *more]) == 130
    captured = capsys.readouterr()
    assert len(captured.out) > 8 and captured.out.endswith("\n")
    assert "Traceback" not in captured.err


def test_figures_say_when_nothing_was_drafted(hybrid: Path, capsys: Capture) -> None:
    stats = RequestStats(prompt_tokens=3, output_tokens=4, steps=3, verified_tokens=3, total_s=1.0)
    assert "no drafts in 3 steps (mtp, suffix)" in figures(stats, ("mtp", "suffix"))
    assert "draft" not in figures(stats, ())
    argv = ["generate", str(hybrid), "--prompt-ids", "5 6 7", "--temperature", "0", "--ignore-eos"]
    assert main([*argv, "--max-tokens", "2", "--draft", "ngram"]) == 0
    assert "no drafts in 1 steps (ngram)" in capsys.readouterr().err
