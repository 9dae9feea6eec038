"""Device steps leave outputs unchanged as requests arrive, end, are cancelled or fail."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import SamplingParams, SpecEngine
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.runner import DeviceDraftRunner
from specdec.core.device.steps import Steps
from specdec.errors import EngineError
from specdec.kernels.table import replaced
from specdec.models.block_head import BlockHead
from tests.lossless.cases import LONGEST, SHAPES, Case, differences, drafting_engine, generate, plain_cases

FEATURES = ("greedy", "temperature", "filters", "stop")
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def known(folder: Path) -> tuple[Path, list[Case]]:
    return folder, [case for case in plain_cases(folder) if case.feature in FEATURES]


def open_engine(folder: Path, **fields: Any) -> SpecEngine:
    settings = {
        "dtype": "float64",
        "draft": "mtp",
        "graphs": True,
        "max_model_len": LONGEST,
        **SHAPES["tree"],
    }
    return SpecEngine(folder, **{**settings, **fields})


class Padded(Steps):
    """Run more rows than there are requests."""

    def size(self, count: int) -> int:
        return count + 3


def check_everything_came_back(engine: SpecEngine) -> None:
    """Check that all memory is free, once the engine's thread, which answers first, has cleaned up."""
    runner = engine.model.loop.runner
    assert runner is not None
    for _ in range(1000):
        if not runner.batch.held:
            break
        time.sleep(0.01)
    engine.model.loop.check_idle()


@pytest.mark.parametrize("backing", ["record", "snapshot"])
def test_a_batch_filled_up_with_padding_says_the_same(known: tuple[Path, list[Case]], backing: str) -> None:
    """As in a captured step: more rows than requests, the others on the dummy slab.

    The slab holds NaN, as after a failed step: only padding may use it.
    """
    folder, cases = known
    with drafting_engine(folder, "mtp", cases, graphs=True, slots=backing, **SHAPES["tree"]) as (engine, _):
        runner, arena = engine.model.loop.runner, engine.model.loop.arena
        assert runner is not None
        arena.data[: arena.layout.slab_bytes].fill_(0xFF)
        runner.batch.steps = Padded(runner.batch.step, runner.batch.rows)
        assert differences(cases, generate(engine, cases)) == []
        assert runner.steps > 0


@pytest.mark.parametrize("draft", ["none", "mtp", "eagle", "block"])
def test_shapes_may_change_from_step_to_step(known: tuple[Path, list[Case]], draft: str) -> None:
    folder, cases = known
    with drafting_engine(folder, draft, cases, graphs=True, adaptive=True, **SHAPES["tree"]) as (engine, _):
        runner = engine.model.loop.runner
        assert isinstance(runner, DeviceDraftRunner)
        shapes, asked = runner.policy.shapes, iter(range(10**6))
        runner.policy.choose = lambda rows: shapes[next(asked) * 7 % len(shapes)]  # type: ignore[method-assign]
        assert differences(cases, generate(engine, cases)) == []
        assert engine.stats().accepted > 0 or draft == "none"


def test_a_head_drafts_after_any_number_of_steps_without_drafts(known: tuple[Path, list[Case]]) -> None:
    """It prefills in between, whenever `chunk_tokens` hidden states are pending."""
    folder, cases = known
    with open_engine(folder, chunk_tokens=8) as engine:
        runner = engine.model.loop.runner
        assert isinstance(runner, DeviceDraftRunner)
        for steps in range(1, 18):
            choices = chain([None] * steps, repeat(runner.policy.bounds))
            runner.policy.choose = lambda _, choices=choices: next(choices)  # type: ignore[method-assign]
            assert differences(cases[:1], generate(engine, cases[:1])) == []
        assert engine.stats().accepted > 0


def test_a_step_lets_others_in_and_out(known: tuple[Path, list[Case]]) -> None:
    """Requests arrive during decoding, and some leave early; the others' outputs are those alone."""
    folder, cases = known
    with open_engine(folder, chunk_tokens=8, max_running=4) as engine:

        async def ask(i: int, case: Case) -> tuple[int, ...]:
            await asyncio.sleep(0.01 * i)
            found: list[int] = []
            async for delta in engine.stream(case.prompt, case.params):
                if delta.index == 0:
                    found += delta.token_ids
                if i % 4 == 3 and len(found) > 2:
                    break
            return tuple(found)

        async def all_of_them() -> list[tuple[int, ...]]:
            return await asyncio.gather(*(ask(i, case) for i, case in enumerate(cases * 3)))

        said = asyncio.run(all_of_them())
        for i, (case, own) in enumerate(zip(cases * 3, said, strict=True)):
            expected = case.said[0].token_ids
            assert own == (expected[: len(own)] if i % 4 == 3 else expected)
        engine.generate([[1]], GREEDY)
        check_everything_came_back(engine)


def test_texts_end_where_the_model_does(known: tuple[Path, list[Case]]) -> None:
    """The device runs beyond the longest text before the host sees its end; the excess is discarded."""
    folder, _ = known
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]
    params = GREEDY.model_copy(update={"max_tokens": 10**6})
    with open_engine(folder) as engine, open_engine(folder, graphs=False) as host:
        device_said, host_said = engine.generate(prompts, params), host.generate(prompts, params)
        assert [c.token_ids for c in device_said] == [c.token_ids for c in host_said]
        assert {len(p) + len(c.token_ids) for p, c in zip(prompts, device_said, strict=True)} == {LONGEST}
        check_everything_came_back(engine)


def test_a_row_whose_numbers_are_nan_fails_alone(known: tuple[Path, list[Case]]) -> None:
    folder, _ = known
    with open_engine(folder) as engine:
        runner = engine.model.loop.runner
        assert runner is not None
        expected = engine.generate([[1, 2, 3], [4, 5]], GREEDY)
        embed_VD = engine.model.network.embed_VD
        poison = next(t for t in expected[0].token_ids[5:] if t not in expected[1].token_ids)
        poison_D = embed_VD[poison].clone()

        async def ask(prompt: list[int]) -> tuple[int, ...]:
            return tuple([t async for d in engine.stream(prompt, GREEDY) for t in d.token_ids])

        async def both() -> list[Any]:
            return await asyncio.gather(*map(ask, ([1, 2, 3], [4, 5])), return_exceptions=True)

        embed_VD[poison] = torch.nan
        failed, said = asyncio.run(both())
        embed_VD[poison] = poison_D
        assert isinstance(failed, EngineError) and "NaN" in str(failed)
        assert said == expected[1].token_ids
        assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected[0].token_ids
        check_everything_came_back(engine)


def test_a_step_that_fails_ends_its_requests_and_nothing_else(known: tuple[Path, list[Case]]) -> None:
    folder, cases = known
    with open_engine(folder) as engine:
        runner = engine.model.loop.runner
        assert runner is not None
        calls = iter(range(100))

        class Failing(Steps):
            def __call__(self, key: GraphKey, size: int) -> Tensor:
                if next(calls) == 3:
                    raise RuntimeError("the device is gone")
                return super().__call__(key, size)

        runner.batch.steps = Failing(runner.batch.step, runner.batch.rows)
        with pytest.raises(EngineError, match="the device is gone"):
            engine.generate([[1, 2, 3]], GREEDY)
        assert differences(cases, generate(engine, cases), within=1e-6) == []
        check_everything_came_back(engine)


def test_too_little_memory_for_records_leaves_the_steps_to_the_host(known: tuple[Path, list[Case]]) -> None:
    folder, cases = known
    with open_engine(folder) as engine:
        layout = engine.model.settings.layout
    slabs = 2 + -(-layout.blocks_for(LONGEST) // layout.blocks_per_slab)
    with open_engine(folder, memory_bytes=(slabs + 1) * layout.slab_bytes, max_running=2) as engine:
        assert differences(cases, generate(engine, cases), within=1e-6) == []
        check_everything_came_back(engine)


def count_syncs(run: Callable[[], Tensor]) -> list[str]:
    """Return the operations of a step that would synchronise a GPU with the host."""
    seen: list[str] = []
    waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique_consecutive")

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            if name in waits or (name == "index" and any(_is_mask(x) for x in args[1])):
                seen.append(name)
            return function(*args, **(kwargs or {}))

    def told(name: str) -> Callable[[Tensor], Any]:
        inner = getattr(Tensor, name)

        def tell(x: Tensor) -> Any:
            seen.append(name)
            return inner(x)

        return tell

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(False), torch.no_grad(), Watch():
        for name in ("tolist", "numpy"):  # on a CPU these access memory without a visible operation
            patch.setattr(Tensor, name, told(name))
        run()
    return seen


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@pytest.mark.parametrize("draft", ["mtp", "eagle", "block"])
def test_what_surrounds_the_network_never_asks_the_host(known: tuple[Path, list[Case]], draft: str) -> None:
    """The network is replaced by a stub, as its GPU kernels do not run here; the rest of the step is real."""
    folder, _ = known
    with open_engine(folder, draft=draft) as engine:
        runner = engine.model.loop.runner
        assert isinstance(runner, DeviceDraftRunner)
        batch, network = runner.batch, engine.model.network
        rows, key = batch.rows.part(0, 2), GraphKey.drafting(runner.policy.bounds, reads=True, filtered=False)
        hidden = network.spec.hidden

        def still(window: Any, *_: Any) -> Tensor:
            return torch.zeros(len(window.token_T), hidden, dtype=torch.float64)

        def aux(window: Any, memory: Any, aux_hidden_layers: Any) -> Any:
            return still(window), [still(window) for _ in aux_hidden_layers]

        step, drafter = batch.step, batch.step.drafter
        assert drafter is not None
        chooses = replaced(
            network.kernels,
            sample=lambda logits_NV, *_: logits_NV.argmax(-1),
            topk_with_noise=lambda logits_NV, rules, seed_N, position_N, count: logits_NV.topk(count)[::-1],
        )
        with pytest.MonkeyPatch.context() as p:
            p.setattr(step, "pack", replace(step.pack, asks=False))
            p.setattr(drafter, "pack", step.pack)
            p.setattr(step, "kernels", chooses)
            p.setattr(drafter, "kernels", chooses)
            p.setattr(network, "forward_with_aux", aux)
            p.setattr(network, "move", lambda *_: None)
            p.setattr(type(drafter.head), "forward", lambda self, window, *_: still(window))
            if isinstance(drafter.head, BlockHead):
                block, deepest = drafter.head.block, drafter.head.deepest
                p.setattr(
                    BlockHead,
                    "draft",
                    lambda self, window, *_: still(window).view(-1, block, hidden)[:, :deepest],
                )
            assert count_syncs(partial(step, rows, key)) == []
        assert count_syncs(lambda: rows.length_B + int(rows.length_B.max())) == ["_local_scalar_dense"]
        assert count_syncs(lambda: rows.length_B + len(rows.length_B.tolist())) == ["tolist"]
