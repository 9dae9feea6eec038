"""Block heads in a whole engine: they draft alike on host and device, and change no text."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specdec import EngineConfig, SpecEngine
from specdec.core.batch import StepReport
from specdec.errors import ConfigError
from specdec.setup.footprint import describe_model
from tests.lossless.cases import SHAPES, Case, differences, drafting_engine, generate, plain_cases
from tests.models.block_heads import block_config, block_tensors, write_block

FEATURES = ("greedy", "temperature", "penalties", "stop")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    return [case for case in plain_cases(folder) if case.feature in FEATURES]


def write_other(folder: Path, **changes: Any) -> None:
    """Write a head of speculators with an embedding of its own, which ranks 33 tokens."""
    fields = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [0, 2, 1],
        "draft_vocab_size": 33,
        **changes,
    }
    config = block_config(3, hidden_size=24, target_hidden_size=32, sliding_window=5, **fields)
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    tensors = block_tensors(config, seed=1)
    own = {"block_size", "target_hidden_size", *fields}
    nested = {name: value for name, value in config.items() if name not in (*own, "dflash_config")}
    flat = {name: config[name] for name in own} | {"mask_token_id": 61, "transformer_layer_config": nested}
    write_block(folder, flat, tensors)


DSPARK = {"speculators_model_type": "dspark", "markov_rank": 7}


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("changes", [{}, {"sample_from_anchor": True}, DSPARK], ids=["", "anchor", "dspark"])
def test_a_head_with_its_own_vocabulary_changes_no_text(
    folder: Path, cases: list[Case], graphs: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_other(tmp_path, **changes)
    fields = {"draft_model": str(tmp_path), "graphs": graphs, "draft_window": 5, **SHAPES["tree"]}
    with drafting_engine(folder, "auto", cases, **fields) as (engine, _):
        assert engine.model.settings.drafters == ("block", "suffix")
        assert differences(cases, generate(engine, cases)) == []
        assert engine.stats().drafted > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_host_and_device_draft_the_same(
    folder: Path, cases: list[Case], shape: str, kind: str, tmp_path: Path
) -> None:
    """At the positions where both draft, until a request's drafts are shortened on the host.

    Of trees, only the first are compared: the host calibrates their scores after each step.
    """
    fields: dict[str, Any] = dict(SHAPES[shape])
    if kind == "dspark":
        write_other(tmp_path, **DSPARK)
        fields["draft_model"] = str(tmp_path)
    alone = [case for case in cases if case.feature in ("greedy", "temperature") and case.params.n == 1]
    for case in alone:
        host, device = (_drafted(folder, case, graphs=graphs, **fields) for graphs in (False, True))
        last = len(case.prompt) + case.params.max_tokens - SHAPES[shape]["num_steps"]
        both = [at for at in host if at in device and at < last]
        both = both if shape == "chain" else both[:2]
        assert len(both) > 1 and len(device[both[1]]) == SHAPES[shape]["num_draft_tokens"]
        assert [host[at] for at in both] == [device[at] for at in both]


def _drafted(folder: Path, case: Case, **fields: Any) -> dict[int, tuple[int, ...]]:
    """Complete a request; return the tokens of each verified tree by its root's position."""
    trees: dict[int, tuple[int, ...]] = {}

    def note(report: StepReport) -> None:
        for row, taken in zip(report.result.rows, report.taken, strict=True):
            trees[len(row.request.tokens) - taken] = row.tree.tokens

    with drafting_engine(folder, "block", [case], **fields) as (engine, _):
        engine.model.loop.observers.append(note)
        assert differences([case], generate(engine, [case])) == []
    return trees


def test_the_depth_follows_from_the_block(folder: Path) -> None:
    with SpecEngine(folder, draft="block", dtype="float64") as engine:
        bounds = engine.model.settings.bounds
        assert (bounds.num_steps, bounds.topk, bounds.num_draft_tokens) == (5, 4, 8)
    with SpecEngine(folder, draft="block", dtype="float64", num_draft_tokens=9) as engine:
        bounds = engine.model.settings.bounds
        assert (bounds.num_steps, bounds.topk, bounds.num_draft_tokens) == (5, 1, 6)
    with pytest.raises(ConfigError, match="the head drafts 5 tokens in its one pass") as caught:
        SpecEngine(folder, draft="block", num_steps=6)
    assert caught.value.field == "num_steps"


def test_a_head_of_another_kind_is_not_taken(folder: Path, tmp_path: Path) -> None:
    write_other(tmp_path)
    for draft, given in (("eagle", tmp_path), ("block", folder / "eagle3")):
        with pytest.raises(ConfigError, match=f"draft='{draft}' needs the folder of") as caught:
            SpecEngine(folder, draft=draft, draft_model=str(given))
        assert caught.value.field == "draft_model"


def test_a_model_is_described_with_its_block_head(folder: Path) -> None:
    own = describe_model(folder, EngineConfig(draft="block"), [64])
    stored = load_file(folder / "dflash" / "model.safetensors")
    assert own["draft"] == "block" and own["eagle_parameters"] == sum(x.numel() for x in stored.values())
