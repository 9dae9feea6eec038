"""Rows that share steps, memory and an engine give the outputs they give alone."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.state_slots.layout import Layout
from tests.selection import EXHAUSTIVE

VOCAB = 320


def draw_requests(seed: int, count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 24),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            seed=rng.getrandbits(40),
            ignore_eos=rng.random() < 0.8,
        )
        for _ in prompts
    ]
    return prompts, params


def alone(folder: Path, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """Complete each request alone, its whole prompt in one window."""
    with SpecEngine(folder, dtype="float64", chunk_tokens=4096) as engine:
        return [engine.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def bytes_for(layout: Layout, sequences: int, length: int) -> int:
    """Return the bytes of this many sequences of a length, and of the dummy slab."""
    blocks = sequences * layout.blocks_for(length)
    slabs = 1 + sequences * layout.states_per_slab + -(-blocks // layout.blocks_per_slab)
    return slabs * layout.slab_bytes


@pytest.fixture(scope="module")
def layout(hybrid: Path) -> Layout:
    with SpecEngine(hybrid, dtype="float64") as engine:
        return engine.model.settings.layout


@pytest.fixture(scope="module")
def drawn(hybrid: Path) -> tuple[list[list[int]], list[SamplingParams], list[Completion]]:
    """Return requests for batches of every chunk length, and their outputs alone."""
    prompts, params = draw_requests(1, 24, longest=90)
    return prompts, params, alone(hybrid, prompts, params)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 64, 512])
def test_a_mixed_batch_equals_its_rows_alone(
    hybrid: Path,
    drawn: tuple[list[list[int]], list[SamplingParams], list[Completion]],
    chunk_tokens: int,
) -> None:
    prompts, params, expected = drawn
    with SpecEngine(hybrid, dtype="float64", chunk_tokens=chunk_tokens) as engine:
        together = engine.generate(prompts, params)
        engine.model.loop.arena.check_integrity()
    assert tokens(together) == tokens(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_that_users_get_batch_alike(hybrid: Path, layout: Layout, dtype: str) -> None:
    """Float32 and bfloat16 use other kernels than float64: alone against mixed and preempted, greedy.

    A token may differ only by rounding, which would be rare in a trained model; the number is bounded.
    """
    prompts, params = draw_requests(8, 16, longest=30)
    params = [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True) for _ in params]
    memory = bytes_for(layout, sequences=4, length=64)
    with SpecEngine(hybrid, dtype=dtype, memory_bytes=memory, max_model_len=64, chunk_tokens=16) as engine:
        together = engine.generate(prompts, params)
    with SpecEngine(hybrid, dtype=dtype, chunk_tokens=4096) as engine:
        single = [engine.generate([p], own)[0] for p, own in zip(prompts, params, strict=True)]
    different = sum(a.token_ids != b.token_ids for a, b in zip(together, single, strict=True))
    print(f"{different} of {len(prompts)} texts differ in {dtype}")
    assert different <= (0 if dtype == "float32" else len(prompts) // 2)


def test_preempted_rows_say_the_same(hybrid: Path, layout: Layout) -> None:
    prompts, params = draw_requests(1, 9, longest=30)
    params = [param.model_copy(update={"max_tokens": 34, "ignore_eos": True}) for param in params]
    memory = bytes_for(layout, sequences=3, length=64)
    with SpecEngine(hybrid, dtype="float64", memory_bytes=memory, max_model_len=64) as engine:
        together = engine.generate(prompts, params)
        assert sum(c.stats.preemptions for c in together) > 0
        limits = engine.model.loop.scheduler.limited_by
        assert limits["KV blocks"] + limits["state slots"] > 0
    assert tokens(together) == tokens(alone(hybrid, prompts, params))


def test_the_number_of_running_requests_is_bounded(hybrid: Path) -> None:
    prompts, params = draw_requests(2, 9, longest=5)
    with SpecEngine(hybrid, dtype="float64", max_running=2) as engine:
        together = engine.generate(prompts, params)
        assert engine.model.loop.scheduler.limited_by["max_running"] > 0
    assert tokens(together) == tokens(alone(hybrid, prompts, params))


def test_the_reference_kernels_say_the_same(hybrid: Path) -> None:
    prompts, params = draw_requests(3, 5, longest=20)
    with SpecEngine(hybrid, dtype="float64", kernels="reference", chunk_tokens=8) as engine:
        together = engine.generate(prompts, params)
    assert tokens(together) == tokens(alone(hybrid, prompts, params))


@pytest.mark.parametrize("model_type", ["qwen3", "nemotron_h"])
def test_other_families_batch_alike(checkpoint: Callable[..., Path], model_type: str) -> None:
    folder = checkpoint(OTHERS[model_type])
    prompts, params = draw_requests(4, 8, longest=70)
    with SpecEngine(folder, dtype="float64", chunk_tokens=16) as engine:
        together = engine.generate(prompts, params)
    assert tokens(together) == tokens(alone(folder, prompts, params))


@EXHAUSTIVE
def test_many_requests_and_cancellations_leave_nothing_behind(hybrid: Path, layout: Layout) -> None:
    """200 concurrent requests in an arena for 6, some cancelled at random times."""
    prompts, params = draw_requests(5, 200, longest=40)
    rng = random.Random(6)
    leave_after = [rng.randint(0, 10) if rng.random() < 0.3 else None for _ in prompts]
    memory = bytes_for(layout, sequences=6, length=64)
    engine = SpecEngine(hybrid, dtype="float64", memory_bytes=memory, max_model_len=64)

    async def one(prompt: list[int], own: SamplingParams, leave: int | None) -> tuple[int, ...] | None:
        said: list[int] = []
        stream = engine.stream(prompt, own)
        async for delta in stream:
            said += delta.token_ids
            if leave is not None and len(said) > leave and delta.finish_reason is None:
                await stream.aclose()
                return None
        return tuple(said)

    async def run() -> list[tuple[int, ...] | None]:
        return await asyncio.gather(*map(one, prompts, params, leave_after))

    with engine:
        said = asyncio.run(run())
        engine.generate([1], SamplingParams(max_tokens=1))
    engine.model.loop.check_idle()
    kept = [i for i, own in enumerate(said) if own is not None]
    assert 100 < len(kept) < 200
    expected = tokens(alone(hybrid, [prompts[i] for i in kept], [params[i] for i in kept]))
    assert [said[i] for i in kept] == expected


OTHERS = {
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    },
}
