"""Unchecked or extreme parameters next to a healthy request."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.config.base import Settings
from specdec.config.structured import Structure
from specdec.core.outputs import Delta
from specdec.errors import ConfigError, SpecdecError

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
HEALTHY = [
    SamplingParams(max_tokens=12, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
]
HUGE = (10**40, -(10**40), 2**63, -(2**63) - 1, 2**31, 1e308, 1e39, -1e308, 5e-324, 1e-300)
NOT_NUMBERS = (float("nan"), float("inf"), float("-inf"), "7", "", None, True, b"7", 1 + 2j, [], {}, object())
ODD = some.one_of(
    some.sampled_from(HUGE),
    some.sampled_from(NOT_NUMBERS),
    some.builds(np.float32, some.floats(width=32)),
    some.builds(np.int64, some.integers(-(2**63), 2**63 - 1)),
    some.just(torch.tensor([1.0, 2.0])),
    some.integers(),
    some.floats(),
    some.text(max_size=3),
    some.lists(some.sampled_from((*HUGE, *NOT_NUMBERS, 0, 1, 319, 320, -1, "\ud800")), max_size=3),
    some.dictionaries(some.sampled_from((0, 319, 320, -1, "a", 2**70)), some.sampled_from(HUGE), max_size=3),
)
FIELDS = tuple(SamplingParams.model_fields)
UPDATES = some.dictionaries(some.sampled_from(FIELDS), ODD, min_size=1, max_size=3)


@pytest.fixture(scope="module", params=[{}, {"graphs": True, "draft": "none"}], ids=["host", "device"])
def engine(request: pytest.FixtureRequest, hybrid: Path) -> Iterator[SpecEngine]:
    with SpecEngine(hybrid, dtype="float32", max_model_len=32, **request.param) as engine:
        yield engine


def texts_beside(engine: SpecEngine, odd: SamplingParams | None) -> list[tuple[int, ...]]:
    """Return the healthy requests' tokens, started in one step with an odd request that was admitted."""
    prepared = [engine.prepare(PROMPT, params) for params in HEALTHY]
    if odd is not None:
        prepared.append(engine.prepare(PROMPT[:4], odd))
    heard = queue.SimpleQueue[tuple[int, Delta | SpecdecError]]()
    left = sum(own.params.n for own in prepared)
    tokens: list[tuple[int, ...]] = [()] * len(prepared)
    engine.submit(prepared, lambda *said: heard.put(said))
    while left:
        index, delta = heard.get(timeout=60)
        if isinstance(delta, SpecdecError):
            assert index == len(HEALTHY), delta
            left -= 1
            continue
        tokens[index] += delta.token_ids
        left -= delta.finish_reason is not None
    return tokens[: len(HEALTHY)]


def refusal(engine: SpecEngine, params: SamplingParams) -> SpecdecError | None:
    try:
        engine.prepare(PROMPT, params)
    except SpecdecError as error:
        return error
    return None


@pytest.mark.parametrize("way", ["copied", "constructed", "written"])
@given(update=UPDATES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_odd_value_never_affects_a_neighbouring_request(
    engine: SpecEngine, way: str, update: dict[str, Any]
) -> None:
    whole = {"max_tokens": 4, **update}
    if way == "copied":
        odd = SamplingParams(max_tokens=4).model_copy(update=update)
    elif way == "constructed":
        odd = SamplingParams.model_construct(**whole)
    else:
        odd = SamplingParams(max_tokens=4)
        odd.__dict__.update(update)
    failed, found = engine.stats().failed_steps, refusal(engine, odd)
    if found:
        assert "\n" not in str(found) and found.field in FIELDS
    else:
        assert texts_beside(engine, odd) == texts_beside(engine, None)
    assert engine.stats().failed_steps == failed


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e308},
        {"temperature": 1e39, "top_k": 10**40},
        {"top_p": 5e-324},
        {"min_p": 5e-324, "temperature": 1.1e-5},
        {"repetition_penalty": 100.0, "temperature": 1e30},
        {"logit_bias": {0: -100.0, 319: 100}, "logprobs": 20},
        {"seed": -(2**63)},
        {"min_tokens": 4, "stop_token_ids": list(range(319))},
        {"max_tokens": 2**31},
    ],
)
def test_the_ends_of_each_range_are_served(engine: SpecEngine, extreme: dict[str, Any]) -> None:
    alone, odd = texts_beside(engine, None), SamplingParams(**{"max_tokens": 4, **extreme})
    assert texts_beside(engine, odd) == alone
    assert engine.generate([PROMPT], odd)[0].token_ids
    assert engine.stats().failed_steps == 0


def test_a_value_that_no_check_has_seen_is_refused_by_name(engine: SpecEngine) -> None:
    for update, field in (({"seed": 2**64}, "seed"), ({"temperature": "1"}, "temperature"), ({"n": 0}, "n")):
        odd = SamplingParams().model_copy(update=update)
        with pytest.raises(ConfigError, match=rf"^SamplingParams\.{field} cannot be .*; give ") as refused:
            engine.generate([PROMPT], odd)
        assert refused.value.field == field
    form = SamplingParams(structured_outputs=Structure(regex="a").model_copy(update={"regex": 5}))
    with pytest.raises(ConfigError, match=r"^Structure\.regex cannot be 5"):
        engine.generate([PROMPT], form)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("made", ["copied", "constructed"])
def test_an_engine_validates_its_configuration_again(made: str) -> None:
    own: dict[str, Any] = {"max_running": "many"}
    config = (
        EngineConfig().model_copy(update=own) if made == "copied" else EngineConfig.model_construct(**own)
    )
    with pytest.raises(ConfigError, match="max_running cannot be 'many'"):
        EngineConfig.of(config, {})


def test_a_value_of_many_lines_is_shown_on_one() -> None:
    with pytest.raises(ConfigError) as refused:
        SamplingParams(seed=torch.ones(3, 3))  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_validated_parameters_do_not_alias_the_callers_list() -> None:
    params: Settings = SamplingParams(stop_token_ids=[1])
    checked = params.checked()
    assert checked == params and checked is not params
