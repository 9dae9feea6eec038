"""A grammar process's memory and time limits grow with its load."""

import socket
import time
from concurrent.futures import Future

from specdec.models.folder import SHIPPED
from specdec.text.grammar.compiler import Grammars
from specdec.text.grammar.guide import GIVEN_UP_S, CompiledGrammar, Guide, Place
from specdec.text.grammar.template import Link
from specdec.text.grammar.wire import COST, Kind, framed
from specdec.text.tokenizer import load_tokenizer


def test_many_long_outputs_of_one_grammar_are_followed() -> None:
    """A matcher retains state for its text: together more than the process's limit for the grammar alone."""
    tokenizer = load_tokenizer(SHIPPED["tiny"])
    assert tokenizer
    grammars = Grammars(tokenizer, 4096, [0])
    form = grammars.begin("json_object", "true").result()
    record = '{"name": "hello world", "x": 123}'
    ids = tokenizer.encode('{"a": [' + ", ".join([record] * 200) + "]")[:2048]
    outputs = [Guide(form) for _ in range(56)]
    for output in outputs:
        for token in ids:
            output.observe(token)
        output.ask([()])
        output.wait(time.monotonic() + 60, always=True)
    grammars.close()
    assert len(ids) == 2048 and not any(output.fault for output in outputs)


def test_a_slow_but_answering_grammar_is_not_abandoned() -> None:
    """The limit is on silence: many concurrent outputs take longer together."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        form = CompiledGrammar(Link(ours), Place(Kind.FREE), width=1, compile_again=lambda: Future())
        first, *others = [Guide(form) for _ in range(3)]
        for own in (first, *others):
            own.observe(1)
            own.ask([()])
        theirs.sendall(framed(COST.pack(0.0) + bytes([Kind.FREE])))
        first.wait(time.monotonic() + 60, always=True)
        form._sent_s -= 2 * GIVEN_UP_S
        theirs.sendall(framed(COST.pack(0.0) + bytes([Kind.FREE])))
        form.take(60.0)
        assert not form.link.is_over and others[0].knows(()) and not others[1].knows(())
