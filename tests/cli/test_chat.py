"""Terminal chat: its messages, commands and input, and a real one in a pty."""

import io
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from specdec import Delta, RequestStats, SamplingParams, SpecEngine
from specdec.cli import main
from specdec.cli.chat import run
from specdec.cli.chat.commands import COMMANDS, NOT_IN_CHATS, CommandReply, run_command
from specdec.cli.chat.conversation import Conversation, joined, load_messages, save_messages
from specdec.cli.chat.history import MOST_ENTRIES, ChatHistory, history_path
from specdec.cli.chat.run import answer
from specdec.cli.chat.session import AnswerPart, ChatPrompt, ChatSession, StreamingAnswer
from specdec.cli.chat.typed import read_message
from specdec.cli.chat.view import DIM, ChatView, figures, wrapped
from specdec.cli.text import ACCEPTED, PLAIN
from specdec.errors import ConfigError, RequestError, SpecdecError
from specdec.models.folder import SHIPPED
from specdec.text.answers.thinking import TAGS
from specdec.text.chat_template import ChatTemplate
from specdec.text.tokenizer import TextPiece
from tests.cli.test_terminal import Terminal

ROOT = Path(__file__).parents[2]
WAIT_S = 30
Capture = pytest.CaptureFixture[str]
QUESTION, ANSWER = {"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "\n    pass\n"}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def test_a_conversation_changes_by_new_ones() -> None:
    empty = Conversation("Be brief.")
    asked = empty.asking("def f(x):")
    whole = asked.answered(ANSWER)
    assert empty.turns == () and asked.turns == (QUESTION,)
    assert whole.messages == [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]
    assert whole.unanswered() == asked == asked.unanswered()
    assert whole.undone() == empty and whole.question == "def f(x):"
    assert empty.undone() is None and empty.unanswered() is None and empty.question == ""
    assert Conversation.of(whole.messages) == whole


def test_joined_texts_put_an_answer_right_after_its_question() -> None:
    turns = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": " return x"}, QUESTION]
    assert joined(turns) == "def f(x):\n    pass\n\ndef f(x): return x\n\ndef f(x):"


def test_messages_are_saved_for_their_owner_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    messages = [QUESTION, {**ANSWER, "reasoning_content": "é 🎉"}]
    save_messages(path, messages, replaces=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_messages(path).messages == messages
    with pytest.raises(RequestError, match="exists"):
        save_messages(path, [], replaces=False)
    save_messages(path, [QUESTION], replaces=True)
    assert load_messages(path).messages == [QUESTION]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path.write_text(json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}))
    assert load_messages(path).messages == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "cannot be read as JSON"),
        ("[]", "holds no messages"),
        ('{"role": "user"}', "holds no messages"),
        ('["hi"]', r"messages\.0 has no role"),
        ('[{"role": "user", "content": 5}]', r"messages\.0\.content is not text"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "text only"),
        (r'[{"role": "user", "content": "\ud800"}]', r"messages\.0: it is not valid Unicode"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_chat_is_refused_by_name(text: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=why):
        load_messages(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["a \\", "b\\", "c"], "a \nb\nc"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two""" '], "one\ntwo"),
        (['"""one"""'], "one"),
        (['/system """', "Be brief.", '"""'], "/system Be brief."),
        (["pasted\nlines"], "pasted\nlines"),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str) -> None:
    given = iter(lines)
    assert read_message(lambda prompt: next(given)) == message
    assert next(given, None) is None


def test_the_history_is_a_bounded_file_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    assert path == tmp_path / "specdec" / "chat_history"
    history = ChatHistory(path)
    assert history.read() == []
    history.add("two\nlines é")
    history.add("x" * 100_000)
    path.chmod(0o644)
    history.add("last")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write('"cut off')
    assert ChatHistory(path).read() == ["two\nlines é", "last"]
    path.write_text("".join(f'"{i}"\n' for i in range(MOST_ENTRIES + 5)))
    assert history.read() == [str(i) for i in range(5, MOST_ENTRIES + 5)]
    assert len(path.read_text().splitlines()) == MOST_ENTRIES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [*path.parent.iterdir()] == [path]
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_path() == tmp_path / ".local" / "state" / "specdec" / "chat_history"


def test_figures_fit_the_terminal() -> None:
    stats = RequestStats(
        prompt_tokens=171, output_tokens=4000, steps=1000, verified_tokens=3000, drafted=5, cached_tokens=117
    )
    timed = replace(stats, total_s=2.5, first_token_s=0.5)
    whole = "4,000 tokens · 2,000 tok/s · first 500 ms · 3.00 tok/step · 117 of 171 cached"
    assert figures(timed, None) == figures(timed, 80) == whole
    assert figures(timed, 41) == "4,000 tokens · 2,000 tok/s"
    assert figures(timed, 5) == "4,000 tokens"
    assert figures(RequestStats(prompt_tokens=3, output_tokens=0), None) == "0 tokens · 0 of 3 cached"
    assert wrapped("a bb ccc\ndd", 6, "  ") == "a bb\n  ccc\ndd"


def test_an_answer_is_shown_harmless_its_drafts_in_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    view = ChatView(coloured=True)
    thought, said = AnswerPart("hm\x1b[2J", True, False), AnswerPart("a\x1b]0;title\x07", False, False)
    view.show([thought, said, AnswerPart("b", False, True), AnswerPart("c", False, True)], drafts=True)
    view.show([AnswerPart("d", False, True)], drafts=False)
    view.end_answer()
    assert out.getvalue() == f"a\\x1b]0;title\\x07{ACCEPTED}bc{PLAIN}d\n"
    view.error("\x1b[31m")
    assert capsys.readouterr().err == f"{DIM}hm\\x1b[2J{PLAIN}\n\n\x1b[31m\\x1b[31m{PLAIN}\n"
    plain = ChatView(coloured=False)
    plain.show([thought, said], drafts=True)
    plain.notice("done")
    assert capsys.readouterr().err == "[thinking]\nhm\\x1b[2J\n[answer]\ndone\n"


class Written:
    """A stand-in for an engine that generates given pieces, one per delta."""

    def __init__(self, pieces: Sequence[TextPiece], why: Any) -> None:
        self.pieces, self.why = pieces, why

    def submit(self, prepared: object, emit: Callable[[int, Delta], None]) -> "Written":
        for i, piece in enumerate(self.pieces):
            why = self.why if i == len(self.pieces) - 1 else None
            emit(0, Delta(piece.text, (i,), pieces=(piece,), finish_reason=why))
        return self

    def cancel(self) -> None:
        """Do nothing: there is nothing to cancel."""


def test_thinking_is_separated_from_the_answer_and_stored_with_it() -> None:
    pieces = [
        TextPiece("first", 0),
        TextPiece(" this</thi", 1),
        TextPiece("nk>\n\nthe", 0),
        TextPiece(" end", 2),
    ]
    question = ChatPrompt(cast(Any, None), TAGS.after("<think>\n"))
    written = StreamingAnswer(cast(SpecEngine, Written(pieces, "stop")), question)
    parts = [part for step in written for part in step]
    assert parts == [
        AnswerPart("first", True, False),
        AnswerPart(" this", True, True),
        AnswerPart("the", False, False),
        AnswerPart(" end", False, True),
    ]
    assert written.message == {
        "role": "assistant",
        "content": "the end",
        "reasoning_content": "first this",
    }
    cut = StreamingAnswer(cast(SpecEngine, Written(pieces[:2], "abort")), question)
    assert len([*cut]) == 2 and cut.message["reasoning_content"] == "first this"
    assert cut.message["content"] == "" and not cut.is_whole


@pytest.fixture(scope="module")
def engine() -> Iterator[SpecEngine]:
    with SpecEngine("tiny", memory_bytes="64MiB", max_model_len=320, max_running=1) as engine:
        yield engine


@pytest.fixture
def chat(engine: SpecEngine) -> ChatSession:
    engine.flush()
    return ChatSession(engine, SHIPPED["tiny"], GREEDY, is_completion=True)


def command(chat: ChatSession, line: str) -> CommandReply:
    reply = run_command(chat, line)
    assert reply is not None
    return reply


def ask(chat: ChatSession, text: str) -> str:
    assert answer(chat, chat.conversation.asking(text), ChatView(coloured=False))
    return str(chat.conversation.turns[-1]["content"])


@pytest.mark.parametrize("completes", [True, False])
def test_later_turns_hit_the_cached_earlier_ones(engine: SpecEngine, completes: bool) -> None:
    engine.flush()
    chat = ChatSession(engine, SHIPPED["tiny"], GREEDY, is_completion=completes)
    cached, lengths = [], []
    asked = chat.conversation
    for text in ("def f(x):\n", "class A:\n", "import os\n", None):
        asked = chat.conversation.asking(text) if text else asked  # None: ask again, as /retry does
        with chat.begin(asked) as written:
            for _ in written:
                pass
        chat.commit(asked, written)
        assert written.last and written.last.stats
        cached.append(written.last.stats.cached_tokens)
        lengths.append(written.last.stats.prompt_tokens)
    assert cached[0] == 0
    # The template of `tiny` renders answers unlike the model's output: only the tokens up to the question are
    # cached.
    assert cached[1] >= lengths[0] - 1 and cached[2] >= lengths[1] - 1
    assert cached[3] == lengths[3] - 1 == lengths[2] - 1
    alone = engine.generate([chat.render(asked.messages)], GREEDY)[0]
    assert alone.text == chat.conversation.turns[-1]["content"]


def test_commands_of_the_conversation(chat: ChatSession, tmp_path: Path, capsys: Capture) -> None:
    first = ask(chat, "def f(x):\n")
    assert capsys.readouterr().out.rstrip("\n") == first.rstrip("\n") and first
    ask(chat, "class A:\n")
    before = chat.conversation
    path = tmp_path / "a chat.json"
    assert "4 messages saved" in command(chat, f"/save {path}").says
    assert command(chat, f"/save {path}").says, "its own file is written anew"
    undone = command(chat, "/undo")
    assert undone.edit == "class A:\n" and len(chat.conversation.turns) == 2
    again = command(chat, "/retry").asks
    assert again == Conversation(turns=(chat.conversation.turns[0],))
    assert answer(chat, again, ChatView(coloured=False)) and chat.conversation.turns[1]["content"] == first
    command(chat, "/system # Python 3")
    assert chat.conversation.system == "# Python 3" and "# Python 3" in command(chat, "/system").says
    command(chat, "/new")
    assert chat.conversation == Conversation("# Python 3")
    command(chat, "/system none")
    with pytest.raises(RequestError, match="/retry: there is no message"):
        command(chat, "/retry")
    with pytest.raises(RequestError, match="/undo: there is no message"):
        command(chat, "/undo")
    command(chat, f"/load {path}")
    assert chat.conversation == before
    rows = dict(command(chat, "/stats").rows)
    assert "of 320 tokens in 4 messages" in rows["context"] and "acceptance length" in rows["accepted"]
    assert re.match(r"\d+ of \d+ prompt tokens were cached", rows["prefixes"])
    helped = [name for name, _ in command(chat, "/help").rows]
    assert [own.split()[0].rstrip(",") for own in helped] == [*COMMANDS]
    assert {"/save FILE", "/think [on|off]", "/bye, /exit, /quit"} <= {*helped}
    assert "not shown" in command(chat, "/drafts").says and not chat.shows_drafts
    assert command(chat, "/drafts on").says == command(chat, "/drafts").says and chat.shows_drafts
    assert command(chat, "/bye").ends and command(chat, "/exit").ends
    for message in ("hello", "/usr/bin/python is gone", "/* a comment */ int x;", " /help", "/"):
        assert run_command(chat, message) is None


def test_settings_are_listed_changed_and_refused_by_name(chat: ChatSession) -> None:
    listed = dict(command(chat, "/set").rows)
    assert listed.keys() == SamplingParams.model_fields.keys() - NOT_IN_CHATS
    assert listed["temperature"] == "0.0" and listed["seed"] == "none" and listed["ignore_eos"] == "on"
    assert "sampling temperature" in command(chat, "/set temperature").says
    lines = ("temperature 0.7", "seed 7", "ignore-eos off", 'stop ["\\n\\n", "x"]', "stop_token_ids 5,6")
    for line in (*lines, "top_k 20", "bad_words foo", "seed none"):
        command(chat, f"/set {line}")
    given = {"temperature": 0.7, "ignore_eos": False, "stop": ["\n\n", "x"], "stop_token_ids": [5, 6]}
    assert chat.params == SamplingParams(max_tokens=24, top_k=20, bad_words=["foo"], **given)
    before = chat.params
    for line, field in (("temprature 1", "temperature"), ("top_p 7", "top_p"), ("n 2", "n")):
        with pytest.raises(SpecdecError, match=field):
            command(chat, f"/set {line}")
    assert command(chat, "/set stop").says.startswith('stop ["\\n\\n", "x"]: strings that end')
    with pytest.raises(ConfigError, match=r"looks like JSON but is not valid; write \"\\n\\n\", or"):
        command(chat, "/set stop ['a']")
    for text in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match=rf"^max_tokens cannot be {text}; give .*, or none for the def"):
            command(chat, f"/set max_tokens {text}")
    with pytest.raises(ConfigError, match=r"^ignore_eos cannot be 'maybe'"):
        command(chat, "/set ignore_eos maybe")
    assert chat.params == before
    assert "max_tokens 256, or what" in command(chat, "/set max_tokens none").says
    for line, why in (
        ("/sytem x", "did you mean /system"),
        ("/clear all", "takes no argument"),
        ("/drafts maybe", "give on or off"),
        ("/save", "name a file"),
        ("/think on", "no switch for thinking"),
    ):
        with pytest.raises(RequestError, match=why):
            command(chat, line)


def test_thinking_is_switched_one_way(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "tiny", "--think", "--no-think"])
    assert ended.value.code == 2 and "--think and --no-think contradict" in capsys.readouterr().err


def test_a_refusal_by_the_template_changes_nothing(engine: SpecEngine, tmp_path: Path) -> None:
    chat = ChatSession(engine, SHIPPED["tiny"], GREEDY)
    source = (
        "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{%- endif %}"
        "{{ messages[-1].content }}"
        "{%- if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    )
    chat.template = ChatTemplate(source, {}, where=tmp_path)
    with pytest.raises(RequestError, match="no system"):
        command(chat, "/system Be brief.")
    assert chat.conversation == Conversation()
    assert chat.render([QUESTION]).endswith("<think>")
    assert "template decides" in command(chat, "/think").says
    command(chat, "/think off")
    assert chat.render([QUESTION]) == QUESTION["content"]
    assert "answer is off" in command(chat, "/think").says


def test_a_full_context_is_reported_with_the_remedy(chat: ChatSession, capsys: Capture) -> None:
    command(chat, "/set max_tokens 1000")
    view = ChatView(coloured=False)
    assert answer(chat, chat.conversation.asking("def f(x):\n"), view)
    said = capsys.readouterr().err
    assert "The context is full (320 tokens): /undo or /clear makes room; --max-model-len takes up to" in said
    before = chat.conversation
    with pytest.raises(RequestError, match="max_model_len is 320") as refused:
        answer(chat, before.asking("class A:\n"), view)
    assert refused.value.field == "prompt" and chat.conversation is before
    command(chat, "/clear")
    command(chat, "/set max_tokens 5")
    ask(chat, "class A:\n")
    assert "Cut at 5 tokens: /set max_tokens allows" in capsys.readouterr().err


def test_an_only_message_is_answered_with_options_as_remedies(engine: SpecEngine, capsys: Capture) -> None:
    for most, says in ((5, "Cut at 5 tokens: --max-tokens allows more."), (1000, "a shorter message makes")):
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        chat = ChatSession(engine, SHIPPED["tiny"], params, is_talk=False)
        assert answer(chat, chat.conversation.asking("def f(x):\n"), ChatView(coloured=False))
        said = capsys.readouterr().err
        assert says in said and "/set" not in said and "/undo" not in said


class Script:
    """An input stub that types given lines, and records the text at each prompt."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.given = iter(lines), list[str]()

    def read(self, given: str) -> str:
        self.given.append(given)
        return next(self.lines)


def test_a_message_that_is_refused_stands_at_the_next_prompt(
    chat: ChatSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "unechoed", nullcontext)
    talk, long = run.InteractiveChat(chat, ChatView(coloured=False)), "x = 1\n" * 300
    script = Script("def f(x):\n", long, "/retry", "/undo", "/nothing", "/bye")
    monkeypatch.setattr(talk, "keyboard", script)
    talk.run("tiny")
    assert script.given == ["", "", long, "", "def f(x):\n", ""]
    said = capsys.readouterr().err
    assert "max_model_len" in said and "In this chat /undo or /clear makes room" in said
    assert "It is the same answer: /set seed none" in said and "There is no command /nothing" in said
    assert chat.conversation == Conversation()


def test_an_interrupt_ends_the_answer_and_keeps_its_text(
    chat: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    command(chat, "/set max_tokens 300")
    shown, pressed = ChatView.show, False

    def show(view: ChatView, parts: Sequence[AnswerPart], *, drafts: bool) -> None:
        nonlocal pressed
        shown(view, parts, drafts=drafts)
        if not pressed and capsys.readouterr().out:
            pressed = True
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ChatView, "show", show)
    assert not answer(chat, chat.conversation.asking("def f(x):\n"), ChatView(coloured=False))
    assert (
        chat.conversation.turns[-1]["content"]
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    monkeypatch.undo()
    command(chat, "/set max_tokens 5")
    ask(chat, "class A:\n")
    assert len(chat.conversation.turns) == 4


SMALL = [
    "--draft",
    "none",
    "--memory-bytes",
    "64MiB",
    "--max-model-len",
    "320",
    "--max-running",
    "1",
    "--temperature",
    "0",
]


def test_piped_input_is_one_turn(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f(x):\n\n/help\n")))
    assert main(["chat", "tiny", *SMALL, "--max-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert ">>>" not in captured.out and "\x1b" not in captured.out and captured.out.endswith("\n")
    assert re.search(r"^8 tokens · .* cached$", captured.err, re.MULTILINE)
    assert main(["chat", "tiny", *SMALL, "--max-tokens", "8", "-p", "def f(x):\n\n/help"]) == 0
    assert capsys.readouterr().out == captured.out, "the last newline is not part of the message"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert main(["chat", "tiny"]) == 2
    assert main(["chat", "tiny", "--message", "\udcff"]) == 2
    assert "message: it is not valid Unicode" in capsys.readouterr().err


AT_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
import specdec.__main__
sys.argv[0] = "specdec"
specdec.__main__.main()
"""


class Person:
    """A user who types at a terminal and reads its output."""

    def __init__(self, argv: Sequence[str], **more: str) -> None:
        self._keys, theirs = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *argv],
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._until_s = time.monotonic() + WAIT_S

    def types(self, keys: str, *, until: str) -> str:
        """Type keys, and return the output up to a pattern."""
        os.write(self._keys, keys.encode())
        seen = b""
        while not re.search(until, text := seen.decode("utf-8", "replace").replace("\r", "")):
            assert time.monotonic() < self._until_s, f"no {until!r} in {text!r}"
            ready, _, _ = select.select([self._keys], [], [], 1)
            if ready:
                try:
                    seen += os.read(self._keys, 1 << 16)
                except OSError:  # the other side is closed
                    break
            elif keys == "\x03":  # it arrived between the prompt and readline's wait
                os.write(self._keys, b"\x03")
        return text

    def leaves(self) -> int:
        """Return the exit code."""
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Kill a process that still runs, and close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self._keys)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    argv = ["chat", "tiny", "--temperature", "0", "--max-tokens", "20000", "--ignore-eos", "--draft", "none"]
    person = Person(argv, XDG_STATE_HOME=str(tmp_path), NO_COLOR="1", LC_ALL="C.UTF-8")
    yield person
    person.close()


def test_a_person_at_a_terminal(person: Person, tmp_path: Path) -> None:
    ready = r">>> $"
    assert "only knows Python" in person.types("", until=ready)
    assert "Ctrl-D or /bye" in person.types("\x03", until=r"ends the chat\.\n.*" + ready)
    person.types("half a line", until="half a line")
    assert "Ctrl-D or /bye" not in person.types("\x03", until=ready)
    person.types("def f(x):\r", until=r"\n.*\n.*\n")
    assert " tokens · " in person.types("\x03", until=ready), "the answer ends, and the chat goes on"
    assert "max_tokens 5\n" in person.types("/set max_tokens 5\r", until=ready)
    assert "did you mean max_tokens" in person.types("/set max_token 5\r", until=ready)
    for keys in ('"""\rclass A:\r    x = 1\r"""\r', "\x1b[200~a = 1\rb = 2\x1b[201~\r"):
        assert "Cut at 5 tokens" in person.types(keys, until=r"max_tokens allows more\.\n.*" + ready)
    path = tmp_path / "chat.json"
    assert "6 messages saved" in person.types(f"/save {path}\r", until=ready)
    person.types("/bye\r", until=r"(?!)")
    assert person.leaves() == 0
    asked, written, *rest = json.loads(path.read_text())
    assert asked == QUESTION and written["role"] == "assistant" and len(written["content"]) > 8
    assert [own["content"] for own in rest[::2]] == ["class A:\n    x = 1", "a = 1\nb = 2"]
    history = tmp_path / "specdec" / "chat_history"
    entries = [json.loads(line) for line in history.read_text().splitlines()]
    assert "a = 1\nb = 2" in entries and entries[-1] == "/bye" and "half a line" not in entries
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
