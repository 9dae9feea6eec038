"""A mixer outside the package, gated linear attention with per-key decay, served with drafts.

This file holds all that a kind of mixer needs: its memory, its cost, and its forward.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specdec import EngineConfig, SamplingParams
from specdec.core.outputs import Delta
from specdec.core.request import Request
from specdec.errors import ConfigError, SpecdecError
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.native.compiled import compiled
from specdec.kernels.table import Kernels, load_kernels
from specdec.models import spec
from specdec.models.feed_forward import MLP
from specdec.models.linear import Linear
from specdec.models.mixers import (
    ArenaViews,
    Attention,
    GatedDeltaNet,
    LoadedMixer,
    Mixer,
    MixerPlacement,
    Step,
)
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.weights import RandomWeights, Weights
from specdec.models.work import ReadingWork
from specdec.setup.build import LoadedModel, build_random
from specdec.setup.footprint import measure
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout, StateShape
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window

CPU = torch.device("cpu")
Texts = dict[tuple[int, bool], list[int]]
"""Token ids by prompt number, and whether it was sampled."""


@dataclass(frozen=True, slots=True)
class Probe(Mixer):
    """S_t = diag(e^{g_t}) S_p + k_t v_tᵀ, o_t = S_tᵀ q_t; p is the parent of t, g_t has one entry per key."""

    heads: int
    key_dim: int
    value_dim: int

    kind: ClassVar[str] = "gated linear attention"

    @property
    def keys(self) -> int:
        return self.heads * self.key_dim

    @property
    def widths(self) -> list[int]:
        """Columns of the queries, keys, decays and values."""
        return [self.keys, self.keys, self.keys, self.heads * self.value_dim]

    def state_shape(self) -> StateShape:
        """Describe records of value, decays, and the key in place of the convolution's input."""
        return StateShape(self.heads, self.key_dim, self.value_dim, 0, self.keys, decay_dim=self.key_dim)

    def matrices(self, hidden: int) -> Mapping[str, tuple[int, int]]:
        return {"probe in": (sum(self.widths), hidden), "probe out": (hidden, self.widths[3])}

    def token_flops(self) -> float:
        return 5.0 * self.keys * self.value_dim

    def build(self, weights: Weights, kernels: Kernels, place: MixerPlacement) -> "LoadedProbe":
        return LoadedProbe(self, weights, kernels, place)


class LoadedProbe(LoadedMixer):
    def __init__(self, s: Probe, weights: Weights, kernels: Kernels, place: MixerPlacement) -> None:
        self.spec, self.index = s, place.state
        rows = dict(zip("qkgv", s.widths, strict=True))
        self.project = Linear.load(weights, kernels, rows, place.reads)
        self.out = Linear.load(weights, kernels, {"o": place.writes}, s.widths[3])

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        projected_TN, memory = self.project(x_TD), step.memory.recurrent(self.index)
        return self.out(step.by_group(lambda group: self.run(group.take(projected_TN), memory, group)))

    def split(self, projected_TN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and log-decays [T, H, K], and values [T, H, W]."""
        parts = projected_TN.to(dtype).split(self.spec.widths, dim=1)
        q_THK, k_THK, g_THK, v_THW = (part.unflatten(1, (self.spec.heads, -1)) for part in parts)
        return q_THK, k_THK, torch.nn.functional.logsigmoid(g_THK) / 4, v_THW

    def run(self, projected_TN: Tensor, memory: RecurrentMemory, group: Group) -> Tensor:
        """Advance the states over a group, one token at a time."""
        if group.path is not None and group.path_length_B is not None:
            _fold(memory, group.state_B, group.path, group.path_length_B)
        dtype = memory.state_SHKW.dtype
        states: list[Tensor] = []
        tokens = list(zip(*self.split(projected_TN, dtype), strict=True))
        read = []
        for b, m in itertools.product(range(group.rows), range(group.width)):
            if m == 0:
                committed_HKW, states = memory.state_SHKW[group.state_B[b]].clone(), []
            q_HK, k_HK, g_HK, v_HW = tokens[b * group.width + m]
            parent = _parent(group, b, m)
            before_HKW = states[parent] if parent >= 0 else committed_HKW
            states.append(_advance(before_HKW, k_HK, g_HK, v_HW))
            read.append(torch.einsum("hkw,hk->hw", states[m], q_HK).flatten())
            if group.record is not None:
                at = group.record.slab_BN[b, m], group.record.index_BN[b, m]
                memory.update_SRHW[at], memory.decay_SRH[at] = v_HW, g_HK
                memory.input_SRC[at] = k_HK.flatten().to(memory.input_SRC.dtype)
            elif group.snapshot_BM is not None:
                memory.state_SHKW[group.snapshot_BM[b, m]] = states[m]
            elif m + 1 == group.width:
                memory.state_SHKW[group.state_B[b]] = states[m]
        return torch.stack(read).to(projected_TN.dtype)

    def fold(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        _fold(memory.recurrent(self.index), slot_B, path, length_B)


def _advance(before_HKW: Tensor, k_HK: Tensor, g_HK: Tensor, v_HW: Tensor) -> Tensor:
    return g_HK.exp()[..., None] * before_HKW + k_HK[..., None] * v_HW[:, None]


def _fold(memory: RecurrentMemory, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
    """Advance each state over its row's accepted records."""
    for b, slot in enumerate(slot_B.tolist()):
        for n in range(int(length_B[b])):
            at = path.slab_BN[b, n], path.index_BN[b, n]
            k_HK = memory.input_SRC[at].to(memory.state_SHKW.dtype).view_as(memory.decay_SRH[at])
            own = k_HK, memory.decay_SRH[at], memory.update_SRHW[at]
            memory.state_SHKW[slot] = _advance(memory.state_SHKW[slot], *own)


def _parent(group: Group, b: int, m: int) -> int:
    if group.ancestors_BMM is None:
        return m - 1
    return max((j for j in range(m) if group.ancestors_BMM[b, m, j]), default=-1)


class RecordOnly(Probe):
    """A probe that supports records only, not snapshots."""

    backings = frozenset({"record"})


NORM = Norm(1e-6)
FULL = Attention(4, 2, 8, 8**-0.5, Rope(4, 1e4), NORM, gated=True)
PROBE = Probe(3, 6, 5)
FFN = MLP(48, "swiglu")
LAYERS = (
    spec.LayerSpec((PROBE,), FFN),
    spec.LayerSpec((FULL, PROBE), FFN),  # in parallel, as in Falcon-H1
    spec.LayerSpec((PROBE,), None),
    spec.LayerSpec((FULL,), FFN),
)
NETWORK = spec.NetworkSpec(
    "probe", 97, 32, LAYERS, NORM, tied=True, max_length=512, eos=(), mtp=(spec.LayerSpec((FULL,), FFN),)
)
PROMPTS = ([5, 9, 31, 5, 9, 31, 5, 9], list(range(3, 60)), [7, 7, 7], [80, 3, 12, 80, 3])
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
DRAFTS: tuple[Mapping[str, Any], ...] = (
    {"draft": "mtp", "num_steps": 3, "topk": 1},
    {"draft": "mtp", "num_steps": 3, "topk": 3, "num_draft_tokens": 9},
    {"draft": "suffix"},
)


def make(network: spec.NetworkSpec = NETWORK, **fields: Any) -> LoadedModel:
    settings = {"device": "cpu", "dtype": "float64", "kernels": "cpu", "max_model_len": 128, **fields}
    config = EngineConfig.of(None, {"max_running": 3, "chunk_tokens": 16, **settings})
    return build_random(network, config, stored=torch.float64, stored_bytes=1, seed=0)


def texts(model: LoadedModel) -> Texts:
    """Complete all prompts, greedily and sampled, in one batch."""
    said: Texts = {}

    def emit(key: tuple[int, bool], delta: Delta | SpecdecError) -> None:
        assert isinstance(delta, Delta), delta
        said.setdefault(key, []).extend(delta.token_ids)

    for (i, prompt), params in itertools.product(enumerate(PROMPTS), (GREEDY, SAMPLED)):
        own = partial(emit, (i, params is SAMPLED))
        request: Request = model.core.new_request(prompt, params, seed=3, emit=own)
        model.core.add_request(request)
    with torch.inference_mode():
        model.core.run_until_idle()
        model.core.check_idle()
    return said


@pytest.fixture(scope="module")
def plain() -> Texts:
    return texts(make(draft="none"))


@pytest.mark.parametrize("slots", ["record", "snapshot"])
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
def test_texts_are_the_same_with_drafts(drafts: Mapping[str, Any], slots: str, plain: Texts) -> None:
    model = make(slots=slots, adaptive=False, prefix_cache=slots == "record", **drafts)
    assert texts(model) == plain
    counts = model.core.stats()
    assert counts.drafted > 50 and counts.accepted > 10


@pytest.mark.skipif(not compiled(), reason="there is no C compiler")
def test_c_kernels_run_with_a_mixer_without_one() -> None:
    """A recorded tape of C calls cannot be replayed if torch computes part of the pass."""
    native: dict[str, Any] = {"dtype": "float32", "kernels": "native"}
    drafted = texts(make(adaptive=False, draft="mtp", num_steps=2, topk=1, **native))
    assert drafted == texts(make(draft="none", **native))


def test_a_tree_equals_each_of_its_paths() -> None:
    """The pairwise reference: o_i = Σ_j w_ij v_j over the path, w_ij = Σ_c q_ic k_jc e^{G_ic − G_jc}."""
    tree = TokenTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 2, 4))
    weights, kernels = RandomWeights(0, torch.float64), load_kernels("cpu")
    layer = PROBE.build(weights, kernels, MixerPlacement(16, 16))
    layout = Layout((), (PROBE.state_shape(),), torch.float64, torch.float64)
    arena = Arena(layout, 8 * layout.slab_bytes, CPU)
    state, records = arena.take_state(0), arena.take_records(0, len(tree))
    assert state is not None and records is not None
    arena.data.zero_()
    row = Row(tree, 0, torch.zeros(1, dtype=torch.int64), state, (), records)
    (group,) = build_window([row], 1, CPU).groups
    projected_TN = torch.randn(len(tree), sum(PROBE.widths), dtype=torch.float64)
    found_TN = layer.run(projected_TN, arena.recurrent(0), group)

    q_THK, k_THK, g_THK, v_THW = layer.split(projected_TN, torch.float64)
    for i in range(len(tree)):
        path = list(tree.path(i))
        sum_PHK = g_THK[path].cumsum(0)
        weight_PH = (q_THK[i] * k_THK[path] * (sum_PHK[-1] - sum_PHK).exp()).sum(-1)
        expected_HW = (weight_PH[..., None] * v_THW[path]).sum(0)
        torch.testing.assert_close(found_TN[i], expected_HW.flatten())


def test_its_costs_are_counted() -> None:
    counted, work = measure(NETWORK, torch.float32), ReadingWork.of(NETWORK)
    assert counted.kinds() == {"gated linear attention": 3, "attention": 2, "dense feed-forward": 3}
    matrices = sum(p.count for p in counted.target if "norm" not in p.name) - 97 * 32
    assert work(1) == 2 * matrices + 3 * PROBE.token_flops() + 2 * FULL.pair_flops()


def test_a_backing_that_a_mixer_lacks_is_refused() -> None:
    network = spec.NetworkSpec(
        "probe", 97, 32, (spec.LayerSpec((RecordOnly(3, 6, 5),), FFN),), NORM, True, 512, ()
    )
    make(network, draft="suffix", slots="record")
    make(network, draft="none", slots="snapshot")
    with pytest.raises(ConfigError, match="gated linear attention"):
        make(network, draft="suffix", slots="snapshot")


def test_kinds_of_mixers_may_be_mixed() -> None:
    """One state slot holds a gated delta net without a convolution and the probe."""
    delta = GatedDeltaNet(2, 2, 4, 4, 1, 1e-6)
    layers = (spec.LayerSpec((delta,), FFN), spec.LayerSpec((PROBE,), FFN))
    network = spec.NetworkSpec("probe", 97, 32, layers, NORM, True, 512, ())
    drafted = make(network, draft="suffix", adaptive=False)
    assert texts(drafted) == texts(make(network, draft="none"))
