"""Training, `transformers` and the engine compute the same from the exported files."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.models.shapes import SHAPES
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.runner import CPU, Runner
from tests.tolerances import LOGITS_RELATIVE
from tools.train_tiny.export import EAGLE, export, export_eagle
from tools.train_tiny.heads import MTP, Eagle3, Head
from tools.train_tiny.recipe import recipe
from tools.train_tiny.trunk import Shape, Trunk

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
LENGTH, DEPTH = 29, 3


@dataclass(frozen=True, slots=True)
class Trained:
    trunk: Trunk
    heads: dict[str, Head]


@pytest.fixture(scope="module")
def trained() -> Trained:
    """Draw a trunk and its heads with norms off their initial values."""
    torch.manual_seed(0)
    shape = Shape(**SIZES)
    trunk = Trunk(shape, chunk=16)
    heads: dict[str, Head] = {"mtp": MTP(shape), "eagle": Eagle3(shape, torch.arange(1, 90, 2))}
    for head in heads.values():
        head.begin(trunk)
    for module in (trunk, *heads.values()):
        for name, weight in module.named_parameters():
            spread = 0.1 if weight.ndim == 1 else 0.3 * weight.shape[-1] ** -0.5
            weight.data += torch.randn(weight.shape) * (0.0 if name.endswith("A_log") else spread)
        module.eval().requires_grad_(False)
    return Trained(trunk, heads)


@pytest.fixture(scope="module")
def folder(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trained")
    mtp, eagle = trained.heads["mtp"], trained.heads["eagle"]
    assert isinstance(mtp, MTP) and isinstance(eagle, Eagle3)
    export(made, {**SHAPES["tiny"], **SIZES}, trained.trunk, mtp, torch.float32)
    export_eagle(made / EAGLE, eagle, torch.float32)
    return made


def _ids(length: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))


def _far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_transformers_computes_the_same_logits(trained: Trained, folder: Path) -> None:
    ids = _ids(LENGTH + DEPTH)[None]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hidden, _ = trained.trunk(ids)
    assert (
        _far(hidden @ trained.trunk.embed_tokens.weight.T, reference(ids).logits.detach()) < LOGITS_RELATIVE
    )


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_the_engines_drafts_equal_those_of_the_trained_head(
    trained: Trained, folder: Path, kind: str
) -> None:
    """The step-by-step recursion of a root in the arena is one column of the unrolled one."""
    trunk, head = trained.trunk, trained.heads[kind]
    ids = _ids(LENGTH + DEPTH)
    embed = trunk.embed_tokens.weight
    hidden, aux = trunk(ids[None], head.aux_hidden_layers)
    states = head.first(hidden, aux)[:, :LENGTH]
    wanted = [F.linear(out, head.output(embed)) for out in head.unroll(states, ids[None], embed, DEPTH)]
    runner = Runner(
        folder, torch.float32, mtp=kind == "mtp", eagle=folder / EAGLE if kind == "eagle" else None
    )
    assert runner.head is not None
    own = runner.sequence()
    runner.step([(own, ids[:LENGTH].tolist())])
    assert _far(own.hidden[0], states[0]) < LOGITS_RELATIVE

    def read(tokens: Tensor, start: int, before: Tensor) -> Tensor:
        assert runner.head is not None
        row = Row(TokenTree.chain(tokens.tolist()), start, own.table_N, own.state)
        window = build_window([row], runner.conv_width, CPU)
        return runner.head.forward(window, before, runner.arena)

    def far(out: Tensor, wanted: Tensor) -> float:
        assert runner.head is not None
        return _far(head.choose(runner.head.logits(out)), wanted)

    for root in (0, 7, LENGTH - 1):
        out = read(ids[1 : root + 2], 0, own.hidden[0][: root + 1])[-1:]
        assert far(out, wanted[0][:, root]) < LOGITS_RELATIVE
        for j in range(1, DEPTH):
            assert far(out, wanted[j][:, root]) > LOGITS_RELATIVE
            out = read(ids[root + j + 1 : root + j + 2], root + j, out)
            assert far(out, wanted[j][:, root]) < LOGITS_RELATIVE


def test_an_eagle_heads_words_are_the_targets() -> None:
    shape = Shape(**SIZES)
    chosen = torch.tensor([3, 8, 90])
    head = Eagle3(shape, chosen)
    assert head.name(torch.tensor([2, 0])).tolist() == [90, 3]
    logits = torch.arange(96.0)[None]
    assert head.choose(logits).tolist() == [[3.0, 8.0, 90.0]]
    assert head.aux_hidden_layers == (2, 2, 4)


def test_the_shipped_recipe_fits_its_shape() -> None:
    plan = recipe("tiny")
    sizes = plan.sizes()
    assert sizes.hidden_size == SHAPES["tiny"]["hidden_size"]
    assert plan.draft_vocab <= sizes.vocab_size
    chunks = [phase.length % 32 for stage in (plan.trunk, plan.mtp, plan.eagle) for phase in stage.phases]
    assert not any(chunks)
