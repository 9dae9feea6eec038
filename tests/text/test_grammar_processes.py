"""Grammar processes end with the engine, and their slots are released."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

from specdec import EngineError, SamplingParams, SpecEngine, Structure
from specdec.text.grammar import template
from specdec.text.grammar.template import MOST_EACH, Link, Template
from tests.selection import EXHAUSTIVE

FORM = Structure(json_object=True)


@pytest.fixture(autouse=True)
def _new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start grammar processes as users get them, not as forks of a test process."""
    monkeypatch.setattr(template, "subprocess", subprocess)


def children() -> set[str]:
    """List this process's grammar child processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # another process may end while it is inspected
            _, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            is_form = b"specdec.text.grammar.child" in (process / "cmdline").read_bytes()
            if int(parent) == os.getpid() and is_form:
                found.add(process.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="there is no /proc")
def test_a_closed_engine_starts_no_process() -> None:
    before = children()
    engine = SpecEngine("tiny", max_model_len=64)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(["x"], SamplingParams(max_tokens=4, structured_outputs=FORM))
    assert children() == before


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="there is no /proc")
def test_a_grammar_compiled_while_the_engine_closes_leaves_no_process() -> None:
    before = children()
    engine = SpecEngine("tiny", max_model_len=64)
    compiling = engine.compile_grammar(SamplingParams(structured_outputs=FORM))
    assert compiling
    until_s = time.monotonic() + 60
    while engine._grammars.template is None and time.monotonic() < until_s:
        time.sleep(0.001)
    engine.close()
    assert compiling.exception(60) is None or isinstance(compiling.exception(), EngineError)
    assert not engine._grammars._known and children() == before


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="there is no /proc")
@EXHAUSTIVE
def test_the_prepared_grammar_process_serves_and_closes() -> None:
    before = children()
    with SpecEngine("tiny", max_model_len=64) as engine:
        for _ in range(2):
            engine.start_grammar_process()
        until_s = time.monotonic() + 60
        while not (template := engine._grammars.template) or not template._control:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        prepared = template._process
        engine.generate(["x"], SamplingParams(max_tokens=4, structured_outputs=FORM))
        assert prepared and template._process is prepared and len(children() - before) == 1
    engine.start_grammar_process()
    assert children() == before, "a closed engine starts none"


def test_a_link_collected_while_a_slot_is_taken_releases_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector runs at any line, so cleanup of a forgotten link must not wait for a lock."""
    ends: list[socket.socket] = []

    def fork() -> socket.socket:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return ours

    def collect(frame: FrameType, event: str, arg: object) -> object:
        if forgotten:
            forgotten.pop()
            gc.collect()
        return collect

    template, taken, forgotten = Template("", 0, 0, []), list[Link](), list[object]()
    monkeypatch.setattr(template, "_fork", fork)

    def take() -> None:
        for _ in range(MOST_EACH):
            cycle: list[object] = [template.copy("", 1.0)]
            cycle.append(cycle)
            forgotten.append(cycle)
        del cycle
        sys.settrace(collect)
        try:
            taken.append(template.copy("", 1.0))
        finally:
            sys.settrace(None)

    gc.disable()
    gc.freeze()  # objects from before, so that each collection is short
    try:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(20)
    finally:
        gc.unfreeze()
        gc.enable()
    assert taken
    for own in taken:
        own.close()
    for end in ends:
        end.close()


@EXHAUSTIVE
def test_a_refused_grammar_releases_its_slot_without_the_collector() -> None:
    """A caller's refused grammars once held all of its slots until the collector ran."""
    with SpecEngine("tiny", max_model_len=64) as engine:
        gc.disable()
        try:
            for number in range(MOST_EACH + 2):
                refused = Structure(regex=f"[{number}")
                compiling = engine.compile_grammar(SamplingParams(structured_outputs=refused))
                assert compiling
                assert "unclosed" in str(compiling.exception(60))
        finally:
            gc.enable()
