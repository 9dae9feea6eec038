"""One tenant's outputs do not affect what another observes: trees, counts and prefixes."""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specdec import SamplingParams, SpecdecError, SpecEngine
from specdec.config.tenant import SOLE, Tenant
from specdec.core.outputs import Delta
from specdec.engine import engine as engine_module

SETTINGS = {"dtype": "float32", "max_model_len": 256, "max_running": 4, "adaptive": False, "num_steps": 4}
CHAIN, TREE = {"topk": 1}, {"topk": 3, "num_draft_tokens": 10}
PROMPTS = [[7, 3, 9, 11, 30, 2, 5, number] for number in range(2)]
PARAMS = [SamplingParams(max_tokens=32, temperature=t, seed=3, ignore_eos=True, trees=True) for t in (0, 0.7)]
ALICE, BOB, SALTED = Tenant("alice"), Tenant("bob"), Tenant("alice", "of bob")


class Got(NamedTuple):
    """All that a request observes, except times."""

    said: tuple[tuple[int, ...], ...]
    drafts: tuple[object, ...]
    origins: tuple[int, ...]
    counts: tuple[object, ...]
    cached: int


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(mtp_num_hidden_layers=1)


def ask(engine: SpecEngine, tenant: Tenant, prompt: list[int], params: SamplingParams) -> Got:
    inbox = queue.SimpleQueue[Delta | SpecdecError]()
    own = params.model_copy(update={"cache_salt": tenant.salt or None})
    engine.submit([engine.prepare(prompt, own, tenant=tenant)], lambda _, delta: inbox.put(delta))
    deltas = list[Delta]()
    while not deltas or deltas[-1].finish_reason is None:
        delta = inbox.get(timeout=60)
        assert isinstance(delta, Delta), delta
        deltas.append(delta)
    stats = deltas[-1].stats
    assert stats
    counts = (
        stats.steps,
        stats.drafted,
        stats.accepted,
        tuple(stats.per_depth),
        tuple(stats.histogram.items()),
    )
    return Got(
        tuple(delta.token_ids for delta in deltas),
        tuple(draft for delta in deltas for draft in delta.drafts),
        tuple(origin for delta in deltas for origin in delta.origins),
        counts,
        stats.cached_tokens,
    )


def ask_all(engine: SpecEngine, tenant: Tenant) -> list[Got]:
    return [ask(engine, tenant, prompt, params) for prompt in PROMPTS for params in PARAMS]


def heard(folder: Path, fields: dict[str, Any], *tenants: Tenant) -> list[list[Got]]:
    """Return what each tenant observes of a new engine that generates the same texts for each in turn."""
    with SpecEngine(folder, **SETTINGS, **fields) as engine:
        got = [ask_all(engine, tenant) for tenant in tenants]
        assert (engine.model.loop.runner is not None) == bool(fields.get("graphs"))
        assert engine.stats().failed_steps == 0
    return got


def cached(got: list[Got]) -> int:
    return sum(own.cached for own in got)


def accepted(got: list[Got]) -> int:
    return sum(own.counts[2] for own in got)  # type: ignore[misc]


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("draft", ["suffix chain", "suffix tree", "ngram tree", "mtp chain"])
def test_observations_reveal_nothing_of_other_tenants_outputs(folder: Path, draft: str, graphs: bool) -> None:
    """Excluded: head trees, and a head combined with look-ups, which verify what performed best so far."""
    name, shape = draft.split()
    fields = {"draft": name, "graphs": graphs, **(CHAIN if shape == "chain" else TREE)}
    (alone,) = heard(folder, fields, BOB)
    *others, again = heard(folder, fields, ALICE, SOLE, Tenant("bob", "salt"), BOB, SALTED, BOB)
    assert all(got == alone for got in others)
    assert cached(again) > cached(alone), "its own it is served with"


@pytest.mark.parametrize("graphs", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("tenant", [SOLE, ALICE, SALTED], ids=["none", "key", "key and salt"])
def test_ones_own_outputs_are_drafted_from(folder: Path, tenant: Tenant, graphs: bool) -> None:
    fields = {"draft": "suffix", "graphs": graphs, **CHAIN}
    first, again = heard(folder, fields, tenant, tenant)
    assert accepted(again) > accepted(first) + 30 and cached(again) > cached(first)


@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_one_tenant_for_all_is_noticed(folder: Path, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the tenant is ignored and everything is shared."""
    monkeypatch.setattr(engine_module, "_salted", lambda tenant, params: SOLE)
    fields = {"draft": draft, "graphs": False, **CHAIN}
    alone, other = heard(folder, fields, ALICE, BOB)
    assert cached(other) > cached(alone) and (draft == "ngram" or accepted(other) > accepted(alone))
