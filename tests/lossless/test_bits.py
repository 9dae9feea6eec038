"""A token's values do not depend on its window's width with the C kernels.

Log-probabilities with drafts equal those without, bit for bit: in float32, with integer weights, and in
bfloat16 except for large weights multiplied by a CPU's matrix units.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.kernels.native import recurrent
from specdec.kernels.native.compiled import compiled
from tests.draft.oracle import Oracle
from tests.lossless.cases import SHAPES, preempt_each
from tests.models.agreeing import END, VOCAB
from tests.models.representatives import EVERY_CELL, REPRESENTATIVES
from tests.selection import only

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")

FORMATS = [
    ("float32", None),
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("float32", "int4"),
]
CASES = [
    *itertools.product(EVERY_CELL, FORMATS),
    *itertools.product((own for own in REPRESENTATIVES if own not in EVERY_CELL), FORMATS[2::2]),
]
BRIEF = {CASES[0], *((family, FORMATS[2]) for family in EVERY_CELL), (EVERY_CELL[0], FORMATS[3])}
"""The subset of the default run."""
TOKENS, LENGTHS = 24, (1, 7, 40, 130)


def prompts() -> list[list[int]]:
    rng = Random(7)
    return [[rng.randrange(END) for _ in range(length)] for length in LENGTHS]


def ask(engine: SpecEngine, *, together: bool) -> list[Completion]:
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=3)
        for i in range(len(LENGTHS))
    ]
    if together:
        return list(engine.generate(prompts(), params))
    return [engine.generate([prompt], own)[0] for prompt, own in zip(prompts(), params, strict=True)]


def numbers(done: Sequence[Completion]) -> list[Any]:
    return [(own.token_ids, [(said.logprob, said.top) for said in own.logprobs or ()]) for own in done]


def settings(dtype: str, quantize: str | None, **fields: Any) -> dict[str, Any]:
    own = {"dtype": dtype, "quantize": quantize, "max_model_len": 256, "kernels": "native", **fields}
    return {"prefix_cache": False, "device": "cpu", **own}


def drafted(
    folder: Path, plain: Sequence[Completion], fields: dict[str, Any], **more: Any
) -> list[list[Any]]:
    """Decode with an oracle that often drafts wrongly, for rows alone and batched."""
    with SpecEngine(folder, draft="ngram", adaptive=False, **fields, **more) as engine:
        speculation = engine.model.loop.speculation
        speculation.drafters.clear()
        texts = [(*prompt, *own.token_ids) for prompt, own in zip(prompts(), plain, strict=True)]
        speculation.add_drafter(Oracle(texts, vocab=VOCAB, rate=0.7))
        found = [numbers(ask(engine, together=together)) for together in (False, True)]
        assert engine.model.loop.counts.accepted > TOKENS
    return found


@pytest.mark.parametrize(("family", "form"), only(BRIEF, CASES))
def test_outputs_are_equal_with_and_without_drafts(
    family_folder: Callable[[str], Path], family: str, form: tuple[str, str | None]
) -> None:
    folder, fields = family_folder(family), settings(*form)
    with SpecEngine(folder, draft="none", **fields) as engine:
        plain = ask(engine, together=False)
        assert numbers(ask(engine, together=True)) == numbers(plain)
    for shape in SHAPES.values():
        for slots in ("record", "snapshot"):
            alone, together = drafted(folder, plain, fields, slots=slots, **shape)
            assert alone == numbers(plain) and together == numbers(plain)


@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", "int8"), ("float32", None)])
def test_keys_of_8_bits_give_the_same_numbers_too(folder: Path, dtype: str, quantize: str | None) -> None:
    """Cached keys are widened before attention, so its kernels do not depend on the window's width."""
    fields = settings(dtype, quantize, kv_dtype="fp8")
    with SpecEngine(folder, draft="none", **fields) as engine:
        plain = ask(engine, together=False)
        assert numbers(ask(engine, together=True)) == numbers(plain)
    with SpecEngine(folder, draft="none", **settings(dtype, quantize)) as engine:
        assert numbers(ask(engine, together=True)) != numbers(plain)
    for shape in SHAPES.values():
        alone, together = drafted(folder, plain, fields, **shape)
        assert alone == numbers(plain) and together == numbers(plain)


@pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
@pytest.mark.parametrize("family", EVERY_CELL)
def test_outputs_do_not_depend_on_chunks_preemption_or_cached_prefixes(
    family_folder: Callable[[str], Path], family: str, dtype: str, quantize: str | None
) -> None:
    folder = family_folder(family)
    with SpecEngine(folder, draft="none", **settings(dtype, quantize)) as engine:
        plain = numbers(ask(engine, together=False))
    for fields in ({"chunk_tokens": 5}, {"chunk_tokens": 64, "prefix_cache": True}):
        with SpecEngine(folder, draft="none", **settings(dtype, quantize, **fields)) as engine:
            for _ in range(3):
                assert numbers(ask(engine, together=True)) == plain
    with SpecEngine(folder, draft="none", **settings(dtype, quantize)) as engine:
        preempt_each(engine)
        assert numbers(ask(engine, together=True)) == plain


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_step_of_many_prompts_gives_each_its_own_numbers(quantize: str) -> None:
    """Also with more tokens than the prefill budget, beside decoding rows."""
    rng = Random(7)
    asked = [[rng.randrange(900) for _ in range(39)] for _ in range(30)]
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    fields = {"quantize": quantize, "draft": "none", "prefix_cache": False, "memory_bytes": "128MiB"}
    with SpecEngine("tiny", **fields) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt in asked]
        assert numbers(engine.generate(asked, params)) == numbers(alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafting_copy_changes_no_output(folder: Path, dtype: str) -> None:
    """An int4 copy of int8 weights: the drafter's rounding differs."""
    fields = settings(dtype, "int8")
    with SpecEngine(folder, draft="none", **fields) as engine:
        plain = numbers(ask(engine, together=False))
    with SpecEngine(folder, draft="self-int4", num_steps=4, adaptive=False, **fields) as engine:
        for together in (False, True):
            assert numbers(ask(engine, together=together)) == plain
        assert engine.model.loop.counts.accepted > TOKENS


def test_a_recurrence_that_solves_a_window_at_once_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = settings("float32", None)
    with SpecEngine(folder, draft="none", **fields) as engine:
        plain = ask(engine, together=False)
    monkeypatch.setattr(recurrent, "has_room", lambda group: False)
    alone, _ = drafted(folder, plain, fields, **SHAPES["tree"])
    assert alone != numbers(plain)
