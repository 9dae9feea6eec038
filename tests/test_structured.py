"""Outputs of a given form: what they are, that drafts change nothing of them, and that drafts keep to it."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec import ConfigError, RequestError, SamplingParams, SpecEngine, Structure, grammars
from specdec.bench.random_model import write_random_checkpoint
from tests.conftest import HYBRID

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
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SpecEngine]]:
    """One without drafts, and others with each kind."""
    folder = tmp_path_factory.mktemp("structured")
    write_random_checkpoint(folder, {**HYBRID, "mtp_num_hidden_layers": 1}, seed=0)
    shared = {"dtype": "float64", "max_model_len": 256}
    tree = {"adaptive": False, "num_steps": 3, "topk": 3, "num_draft_tokens": 10}
    chain = {"adaptive": False, "num_steps": 4, "topk": 1}
    made = [
        SpecEngine(folder, draft="none", prefix_cache=False, **shared),
        SpecEngine(folder, draft="mtp", **chain, **shared),
        SpecEngine(folder, draft="mtp", **tree, **shared),
        SpecEngine(folder, draft="suffix", **tree, **shared),
    ]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", FORMS)
def test_an_output_has_its_form_and_drafts_change_nothing_of_it(name: str, engines: list[SpecEngine]) -> None:
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
    """Where one token alone may follow, a head that knows nothing guesses it."""
    only = Structure(choice=["0123456789" * 4])
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, structured_outputs=only)
    lengths = [engine.generate(["a"], params)[0].stats.acceptance_length for engine in engines[:3]]
    assert lengths[0] == 1.0
    assert lengths[1] > 3 and lengths[2] > 2


def test_a_form_binds_whatever_else_is_asked(engines: list[SpecEngine]) -> None:
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


def test_a_model_without_an_end_stops_where_its_form_does(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, HYBRID, seed=0)
    for name in ("config.json", "generation_config.json"):
        if (path := tmp_path / name).is_file():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    with SpecEngine(tmp_path, dtype="float64", draft="ngram") as engine:
        assert not engine.model.network.spec.eos
        params = SamplingParams(max_tokens=20, structured_outputs=Structure(choice=["abc"]))
        (own,) = engine.generate(["x"], params)
    assert (own.text, own.finish_reason) == ("abc", "stop")


def test_a_grammar_that_takes_ever_longer_is_given_up(
    engines: list[SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to read an ambiguous text is followed; a neighbour is answered all the same."""
    monkeypatch.setattr(grammars, "SLOW_S", 0.002)
    params = SamplingParams(
        max_tokens=200,
        min_tokens=200,
        temperature=0.0,
        structured_outputs=Structure(grammar='root ::= root root | "a"'),
    )
    for engine in engines[:3]:
        with pytest.raises(RequestError, match="too long to follow"):
            engine.generate(["x"], params)
        (own,) = engine.generate(["x"], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(own.token_ids) == 5


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
def test_a_form_that_is_none_is_refused(form: Structure, names: str, engines: list[SpecEngine]) -> None:
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


def test_a_form_that_takes_long_to_compile_is_given_up_and_keeps_no_other_waiting(
    engines: list[SpecEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    compiled = grammars._compiled

    def slowly(compiler: object, kind: str, source: str) -> object:
        if source == "a+":
            begun.set()
            go_on.wait(60)
        return compiled(compiler, kind, source)

    monkeypatch.setattr(grammars, "_compiled", slowly)
    monkeypatch.setattr(grammars, "PATIENCE_S", 0.2)
    slow, quick = (SamplingParams(structured_outputs=Structure(regex=own)) for own in ("a+", "b"))
    with pytest.raises(RequestError, match=r"structured_outputs.regex: it was not compiled within 0.2 s"):
        engines[0].prepare("a", slow)
    assert begun.is_set()
    monkeypatch.setattr(grammars, "PATIENCE_S", 60)
    assert engines[0].prepare("a", quick).grammar
    go_on.set()
    assert engines[0].prepare("a", slow).grammar


@pytest.mark.parametrize("schema", [{"anyOf": []}, {"enum": []}])
def test_a_schema_that_nothing_fits_is_refused(schema: dict[str, object], engines: list[SpecEngine]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        engines[0].prepare("a", SamplingParams(structured_outputs=Structure(json_schema=schema)))


def test_a_form_that_is_too_long_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ConfigError, match="200,000 characters"):
        Structure(regex="a" * 200_000)
