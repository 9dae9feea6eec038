"""Structured outputs: they match the grammar, drafts do not change them, and drafts obey the grammar."""

import json
import marshal
import queue
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from specdec import ConfigError, Delta, RequestError, SamplingParams, SpecdecError, SpecEngine, Structure
from specdec.bench.random_model import write_random_checkpoint
from specdec.config.tenant import Tenant
from specdec.text.grammar import compiler, template
from specdec.text.grammar.child import receive
from specdec.text.grammar.guide import CompiledGrammar, Guide, Place
from specdec.text.grammar.template import Link
from specdec.text.grammar.wire import COST, Job, Kind, framed
from specdec.verify import sampler
from tests.conftest import HYBRID
from tests.selection import only

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "old": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "old", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    found = json.loads(text, strict=False)  # strings of bounded length may hold control characters
    return (
        list(found) == ["name", "old", "tags"]
        and len(found["name"]) <= 5
        and isinstance(found["old"], bool)
        and set(found["tags"]) <= {"a", "bb"}
    )


CHOICES = ["yes", 'no, "never"\n', "日本 maybe"]
FORMS: dict[str, tuple[Structure, Callable[[str], object]]] = {
    "json_schema": (Structure(json_schema=PERSON), is_person),
    "json_schema text": (Structure(json_schema=json.dumps(PERSON)), is_person),
    "any JSON": (Structure(json_schema={}), lambda text: json.loads(text) or True),
    "json_object": (Structure(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        Structure(regex=r"[a-c]{3}-\d{2,4}(é|ß)"),
        lambda text: re.fullmatch(r"[a-c]{3}-\d{2,4}(é|ß)", text),
    ),
    "choice": (Structure(choice=CHOICES), CHOICES.__contains__),
    "grammar": (
        Structure(grammar='root ::= "(" root ")" | "x"'),
        lambda text: text.strip("()") == "x" and text.count("(") == text.count(")"),
    ),
}


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[..., Path]) -> Iterator[list[SpecEngine]]:
    """Return an engine without drafts, and others with each kind."""
    folder = checkpoint(mtp_num_hidden_layers=1)
    shared = {"dtype": "float64", "max_model_len": 256}
    tree = {"adaptive": False, "num_steps": 3, "topk": 3, "num_draft_tokens": 10}
    chain = {"adaptive": False, "num_steps": 4, "topk": 1}
    made = [
        SpecEngine(folder, draft="none", prefix_cache=False, **shared),
        SpecEngine(folder, draft="mtp", **chain, **shared),
        SpecEngine(folder, draft="mtp", **tree, **shared),
        SpecEngine(folder, draft="suffix", **tree, **shared),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "WAIT_S", 10.0)  # masks must not be late on a busy machine
        yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", only({"json_schema", "regex", "choice", "grammar"}, FORMS))
def test_an_output_matches_its_grammar_and_drafts_change_nothing(
    name: str, engines: list[SpecEngine]
) -> None:
    form, fits = FORMS[name]
    params = [
        SamplingParams(max_tokens=90, temperature=t, seed=seed, structured_outputs=form)
        for seed, t in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 0.6))
    ]
    prompts = ["a: ", "b" * 40, [1], "c"]
    told = [[(own.token_ids, own.text) for own in e.generate(prompts, params)] for e in engines]
    assert told[1:] == told[:1] * 3
    ended = [
        text
        for own in engines[0].generate(prompts, params)
        if own.finish_reason == "stop" and (text := own.text)
    ]
    assert ended, "some reach their end"
    assert all(fits(text) for text in ended)


def test_drafts_keep_to_the_form(engines: list[SpecEngine]) -> None:
    """If a single token is allowed, even an untrained head proposes it."""
    only = Structure(choice=["0123456789" * 4])
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, structured_outputs=only)
    lengths = [engine.generate(["a"], params)[0].stats.acceptance_length for engine in engines[:3]]
    assert lengths[0] == 1.0
    assert lengths[1] > 3 and lengths[2] > 2


def test_a_grammar_binds_with_all_other_parameters(engines: list[SpecEngine]) -> None:
    params = SamplingParams(
        max_tokens=40,
        min_tokens=40,
        temperature=1.5,
        seed=1,
        ignore_eos=True,
        frequency_penalty=1.0,
        logit_bias={5: 100.0},
        logprobs=2,
        structured_outputs=Structure(choice=["abc"]),
    )
    for own in engines[2].generate(["x", "y"], params):
        assert own.text == "abc" and own.finish_reason == "stop"
        assert own.logprobs is not None and len(own.logprobs) == len(own.token_ids)


def test_a_model_without_eos_stops_with_its_grammar(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, HYBRID, seed=0)
    for name in ("config.json", "generation_config.json"):
        if (path := tmp_path / name).is_file():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    with SpecEngine(tmp_path, dtype="float64", draft="ngram") as engine:
        assert not engine.model.network.spec.eos
        params = SamplingParams(max_tokens=20, structured_outputs=Structure(choice=["abc"]))
        (own,) = engine.generate(["x"], params)
    assert (own.text, own.finish_reason) == ("abc", "stop")


def test_a_grammar_that_takes_ever_longer_is_given_up(engines: list[SpecEngine]) -> None:
    """Each parse of an ambiguous text is tracked; neighbours are unaffected, even with the same grammar."""
    hostile = Structure(regex="((x{0,60}){0,40}){0,40}")
    for engine in engines[:3]:
        assert engine.tokenizer
        (token,) = engine.tokenizer.encode("x")
        slow = SamplingParams(
            max_tokens=200,
            min_tokens=200,
            temperature=0.0,
            logit_bias={token: 100.0},
            structured_outputs=hostile,
        )
        with pytest.raises(RequestError, match="too long or too much memory"):
            engine.generate(["x"], slow)
        (own,) = engine.generate(["x"], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(own.token_ids) == 5


def test_a_process_that_ends_costs_only_the_output_it_worked_for(
    engines: list[SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others with the same grammar continue in another process, and their texts are unchanged."""
    monkeypatch.setattr(sampler, "WAIT_S", 0.005)
    form = Structure(regex="((x{0,60}){0,40}){0,40}|[ab]{60}")
    for engine in engines:
        assert engine.tokenizer
        (x,) = engine.tokenizer.encode("x")
        mild, hostile = (
            SamplingParams(
                max_tokens=60,
                min_tokens=50,
                temperature=1.0,
                seed=1,
                logit_bias={x: bias},
                structured_outputs=form,
            )
            for bias in (-100.0, 100.0)
        )
        (wanted,) = engine.generate(["x"], mild)
        inbox = queue.SimpleQueue[tuple[int, Delta | SpecdecError]]()
        engine.submit(
            [engine.prepare("x", own) for own in (mild, hostile, mild)],
            lambda *said, inbox=inbox: inbox.put(said),
        )
        texts, left = ["", "", ""], {0, 1, 2}
        while left:
            index, delta = inbox.get(timeout=60)
            if isinstance(delta, SpecdecError):
                assert index == 1 and "too long or too much memory" in str(delta)
                left.remove(index)
            else:
                texts[index] += delta.text
                left -= {index} if delta.finish_reason else set()
        assert texts[0] == texts[2] == wanted.text and set(texts[0]) <= set("ab")


def test_a_fault_ends_its_asking() -> None:
    """Queued requests are dropped, and no more are made."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        form = CompiledGrammar(Link(ours), Place(Kind.FREE), width=1, compile_again=lambda: Future())
        guide, other = Guide(form), Guide(form)
        other.observe(1)
        other.ask([()])
        guide.observe(1)
        guide.ask([(), (2,), (3,)])
        guide.fail("it has one")
        guide.ask([(4,), (5,)])
        with theirs.makefile("rb") as frames:
            (asked,) = (Job(*load) for load in marshal.loads(receive(frames)))
        assert asked.output == other.number
        theirs.sendall(framed(COST.pack(0.0) + bytes([Kind.DEAD])))
        other.wait(time.monotonic() + 60, always=True)
        assert other.fault and other.knows(()) and guide.fault == "it has one"
        other.ask([(6,)])
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_a_late_mask_applies_to_the_state_it_was_requested_for() -> None:
    """Tokens accepted meanwhile follow a requested path, or leave all of them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        form = CompiledGrammar(Link(ours), Place(Kind.FREE), width=1, compile_again=lambda: Future())
        guide = Guide(form)
        guide.observe(1)
        guide.ask([(), (2,), (3,), (2, 4)])
        guide.observe(2)
        words = {path: bytes([number] * 4) for number, path in enumerate([(), (2,), (3,), (2, 4)], 1)}
        places = b"".join(bytes([Kind.BOUND]) + word for word in words.values())
        theirs.sendall(framed(COST.pack(0.0) + places))
        guide.wait(time.monotonic() + 60, always=True)
        assert [guide.knows(path) for path in ((), (4,), (2,), (3,))] == [True, True, False, False]
        for path, own in (((), words[2,]), ((4,), words[2, 4])):
            found = guide.words(path)
            assert found is not None and found.numpy().tobytes() == own


@pytest.mark.parametrize(
    ("form", "names"),
    [
        (Structure(json_schema="{"), "json_schema"),
        (Structure(json_schema={"type": "nonsense"}), "json_schema"),
        (Structure(regex="(a"), "regex"),
        (Structure(grammar="root :="), "grammar"),
        (Structure(grammar='other ::= "a"'), "grammar"),
        (Structure(structural_tag={}), "structural_tag"),
        (Structure(structural_tag={"type": "x"}), "structural_tag"),
    ],
)
def test_an_invalid_grammar_is_refused(form: Structure, names: str, engines: list[SpecEngine]) -> None:
    with pytest.raises(RequestError, match=names) as caught:
        engines[0].generate(["x"], SamplingParams(structured_outputs=form))
    assert caught.value.field == "structured_outputs" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "structured_outputs"), ({"regex": "a", "choice": ["b"]}, "choice"), ({"choice": []}, "choice")],
)
def test_an_output_has_one_form(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Structure(**fields)
    assert caught.value.field == field


def test_a_slow_grammar_compilation_is_abandoned_and_delays_no_other(
    engines: list[SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compile time limit is short here; a known grammar needs no slot."""
    slow = [
        SamplingParams(structured_outputs=Structure(regex=f"({'|'.join('ab' * n for n in range(150))}){m}"))
        for m in range(4)
    ]
    quick = SamplingParams(structured_outputs=Structure(regex="known"))
    engines[0].prepare("a", quick)
    monkeypatch.setattr(compiler, "PATIENCE_S", 0.0)
    for own in slow:
        with pytest.raises(RequestError, match=r"structured_outputs.regex: it was not compiled within 0 s"):
            engines[0].prepare("a", own)
    assert engines[0].prepare("a", quick).grammar
    monkeypatch.setattr(compiler, "PATIENCE_S", 60.0)
    assert engines[0].prepare("a", slow[0]).grammar


def test_a_grammar_is_reused_within_its_tenant_only(engines: list[SpecEngine]) -> None:
    """Compile latency would reveal to others which grammars were requested."""
    plain, salted = (
        SamplingParams(structured_outputs=Structure(regex="kept"), cache_salt=salt) for salt in (None, "own")
    )

    def compiled(params: SamplingParams, caller: str) -> CompiledGrammar | None:
        return engines[0].prepare("a", params, tenant=Tenant(caller)).grammar

    first = compiled(plain, "alice")
    assert first is compiled(plain, "alice")
    others = [compiled(plain, "bob"), compiled(salted, "alice"), compiled(plain, "")]
    assert len({first, *others}) == 4


def test_cached_grammars_are_evicted_on_demand(
    engines: list[SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "MOST", 3)
    monkeypatch.setattr(template, "MOST_EACH", 2)
    spec = engines[0].model.network.spec
    own = compiler.Grammars(engines[0].tokenizer, spec.vocab, spec.eos)
    alice, bob = Tenant("alice"), Tenant("bob")
    kept = own.begin("regex", "hers", alice).result()
    for number in range(4):
        own.begin("regex", f"{number}", bob).result()
    assert own.begin("regex", "hers", alice).result() is kept
    held = [own.begin("regex", f"held {number}", bob).result() for number in range(2)]
    monkeypatch.setattr(compiler, "PATIENCE_S", 0.0)
    with pytest.raises(RequestError, match="it was not compiled within 0 s"):
        own.begin("regex", "one more", bob).result()
    assert own.begin("regex", "hers", alice).result() is kept and len(held) == 2
    own.close()


@pytest.mark.parametrize("schema", [{"anyOf": []}, {"enum": []}])
def test_a_schema_that_nothing_fits_is_refused(schema: dict[str, object], engines: list[SpecEngine]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        engines[0].prepare("a", SamplingParams(structured_outputs=Structure(json_schema=schema)))


def test_a_too_long_grammar_is_refused_before_parsing() -> None:
    with pytest.raises(ConfigError, match="200,000 characters"):
        Structure(regex="a" * 200_000)
