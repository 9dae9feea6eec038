"""EAGLE heads in a whole engine: they draft on host and device alike, and change no text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec import EngineConfig, SpecEngine
from specdec.bench.random_eagle import write_random_eagle
from specdec.errors import CheckpointError, ConfigError
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle_head import EagleHead
from specdec.models.families import read_network
from specdec.models.files import COUNTS
from specdec.models.shortlist import commonest
from specdec.setup.footprint import describe_model
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate, plain_cases
from tests.models.agreeing import VOCAB, write_agreeing

FEATURES = ("greedy", "temperature", "penalties", "stop")
Known = Callable[[str], tuple[Path, list[Case]]]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    made: dict[str, tuple[Path, list[Case]]] = {}

    def make(family: str) -> tuple[Path, list[Case]]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write_agreeing(folder, family)
            (folder / COUNTS).write_text(json.dumps({"counts": [token % 7 for token in range(VOCAB)]}))
            made[family] = folder, [case for case in plain_cases(folder) if case.feature in FEATURES]
        return made[family]

    return make


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_a_random_head_of_the_first_layout_changes_no_text(
    known: Known, family: str, graphs: bool, tmp_path: Path
) -> None:
    folder, cases = known(family)
    write_random_eagle(tmp_path, read_network(Checkpoint(folder)), seed=1, kind="eagle")
    fields = {"draft_model": str(tmp_path), "graphs": graphs, **SHAPES["tree"]}
    with drafting_engine(folder, "auto", cases, **fields) as (engine, _):
        assert engine.model.settings.drafters == ("eagle", "suffix")
        assert differences(cases, generate(engine, cases)) == []
        head = engine.model.loop.speculation.head
        assert head and isinstance(head.head, EagleHead) and not head.head.aux_hidden_layers
        assert engine.stats().drafted > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
def test_a_head_may_be_narrower_than_its_target(known: Known, graphs: bool, tmp_path: Path) -> None:
    folder, cases = known("qwen3_5")
    network = read_network(Checkpoint(folder))
    write_random_eagle(tmp_path, network, seed=1, hidden_size=24, head_dim=8)
    fields = {"draft_model": str(tmp_path), "graphs": graphs, **SHAPES["tree"]}
    with drafting_engine(folder, "eagle", cases, **fields) as (engine, _):
        assert differences(cases, generate(engine, cases)) == []
        assert engine.stats().drafted > 0


ECONOMIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vocabulary": ("tree", {"draft_vocab": 40}),
    "window": ("tree", {"draft_window": 5}),
    "both": ("chain", {"draft_vocab": 40, "draft_window": 5}),
}


@pytest.mark.parametrize("economy", ECONOMIES)
@pytest.mark.parametrize("draft", ["mtp", "eagle"])
@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
def test_economies_change_no_text(known: Known, draft: str, economy: str, graphs: bool) -> None:
    folder, cases = known("qwen3_5")
    shape, fields = ECONOMIES[economy]
    with drafting_engine(folder, draft, cases, graphs=graphs, **fields, **SHAPES[shape]) as (engine, _):
        decided = [case for case in cases if case.feature in ("greedy", "temperature")]
        for some in (decided, cases):
            assert differences(some, generate(engine, some)) == []
        runner = engine.model.loop.runner
        assert engine.stats().accepted > 0 and (runner is not None and runner.steps > 0) == graphs


def test_a_model_is_described_with_the_head_that_drafts(known: Known, tmp_path: Path) -> None:
    folder, _ = known("qwen3")
    plain, own = (describe_model(folder, EngineConfig(draft=name), [64]) for name in ("none", "eagle"))
    write_random_eagle(tmp_path, read_network(Checkpoint(folder)), seed=1, kind="eagle")
    given = describe_model(folder, EngineConfig(draft_model=str(tmp_path)), [64])
    assert (plain["draft"], own["draft"], given["draft"]) == ("none", "eagle", "eagle, suffix")
    assert plain["kv_bytes_per_token"] < own["kv_bytes_per_token"] == given["kv_bytes_per_token"]
    stored = load_file(tmp_path / "model.safetensors")
    counted = sum(x.numel() for name, x in stored.items() if name not in ("d2t", "t2d"))
    heads = [each["heads"] for each in (plain, given)]
    assert heads == ["eagle (eagle3), block (dflash)", f"eagle ({tmp_path.name})"]
    assert plain["eagle_parameters"] == 0 < given["eagle_parameters"] == counted


@pytest.mark.parametrize("draft", ["mtp", "eagle"])
def test_only_the_commonest_tokens_are_drafted(known: Known, draft: str) -> None:
    """An EAGLE-3 head's own vocabulary is restricted further."""
    folder, _ = known("qwen3_5")
    wanted = set(commonest(folder, 20, VOCAB).tolist())
    assert wanted == {token for token in range(VOCAB) if token % 7 > 4} | {4, 11}
    with SpecEngine(folder, dtype="float64", draft=draft, draft_vocab=20) as engine:
        loop = engine.model.loop
        assert loop.speculation.head
        head, hidden_TD = loop.speculation.head.head, torch.randn(3, 32, dtype=torch.float64)
        ranked = head.logits(hidden_TD).isfinite()
        own = {token for token in range(VOCAB) if token % 4 != 1} if draft == "eagle" else wanted
        assert all(set(row.nonzero()[:, 0].tolist()) == wanted & own for row in ranked)
        assert bool(engine.model.network.project(hidden_TD).isfinite().all()), "the target chooses among all"
    with SpecEngine(folder, dtype="float64", draft=draft) as whole:
        assert whole.model.loop.speculation.head
        all_TV = whole.model.loop.speculation.head.head.logits(hidden_TD)
        assert torch.allclose(head.logits(hidden_TD)[ranked], all_TV[ranked], rtol=1e-12)


def test_commonest_tokens_that_a_head_cannot_say_are_refused(known: Known) -> None:
    folder, _ = known("qwen3_5")
    before = (folder / COUNTS).read_text()
    (folder / COUNTS).write_text(json.dumps({"counts": [int(token == 1) for token in range(VOCAB)]}))
    try:
        with pytest.raises(ConfigError, match="the head can draft none") as caught:
            SpecEngine(folder, draft="eagle", draft_vocab=1)
    finally:
        (folder / COUNTS).write_text(before)
    assert caught.value.field == "draft_vocab"


@pytest.mark.parametrize(
    ("fields", "error", "field", "words"),
    [
        ({"draft": "eagle", "draft_model": "nowhere"}, CheckpointError, "draft_model", "is neither a folder"),
        ({"draft": "suffix", "draft_vocab": 9}, ConfigError, "draft_vocab", "suffix drafts"),
        ({"draft": "ngram", "draft_window": 9}, ConfigError, "draft_window", "draft='mtp' or 'eagle'"),
        ({"draft": "none", "draft_window": 9}, ConfigError, "draft_window", 'draft="none"'),
        ({"draft": "mtp", "draft_vocab": 0}, ConfigError, "draft_vocab", "at least 1"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    known: Known, fields: dict[str, Any], error: type[Exception], field: str, words: str
) -> None:
    folder, _ = known("qwen3_5")
    with pytest.raises(error, match=words) as caught:
        SpecEngine(folder, **fields)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["{", "[]", '{"counts": 5}', '{"counts": [1.5]}', '{"counts": [-1]}'])
def test_counts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / COUNTS).write_text(text)
    with pytest.raises(ConfigError, match=COUNTS) as caught:
        commonest(tmp_path, 3, 8)
    assert caught.value.field == "draft_vocab"


def test_without_counts_the_first_tokens_are_the_commonest(tmp_path: Path) -> None:
    assert commonest(tmp_path, 3, 8).tolist() == [0, 1, 2]
    assert commonest(tmp_path, 99, 8).tolist() == list(range(8))


def test_the_commonest_are_those_with_most_counts(tmp_path: Path) -> None:
    """Ties go to smaller ids; tokens without a count have none; a larger number selects all."""
    (tmp_path / COUNTS).write_text('{"counts": [1, 5, 0, 5, 1, 1]}')
    assert commonest(tmp_path, 3, 8).tolist() == [0, 1, 3]
    assert commonest(tmp_path, 6, 8).tolist() == [0, 1, 2, 3, 4, 5]
    assert commonest(tmp_path, 99, 8).tolist() == list(range(8))
    with pytest.raises(ConfigError, match="of the model's 5 tokens"):
        commonest(tmp_path, 3, 5)
