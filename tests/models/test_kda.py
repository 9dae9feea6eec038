"""Kimi's delta attention as a layer: against transformers, in its two variants, and its record sizes."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from specdec.kernels.native.compiled import compiled
from specdec.kernels.table import load_kernels
from specdec.models import spec
from specdec.models.mixers import KimiDeltaAttention, LoadedMixer, MixerPlacement, Step
from specdec.models.weights import Scoped, Weights
from specdec.state_slots.layout import Layout
from specdec.state_slots.window import Window
from tests.kernels.mixers import OneLayer
from tests.kernels.trees import Layer, build_group, chain, make_memory, path_to, random_tree, scattered
from tests.models.test_probe_mixer import DRAFTS, FFN, FULL, NORM, make, texts
from tests.tolerances import LOGITS_RELATIVE

HIDDEN, HEADS, SIZE, TAPS, EPS = 45, 3, 10, 4, 1e-5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "linear_num_heads": HEADS,
    "linear_head_dim": SIZE,
    "linear_conv_kernel_dim": TAPS,
    "rms_norm_eps": EPS,
}
OURS = {"b_proj": "in_b", "f_proj": "in_a", "g_proj": "in_z", "f_a_proj": "in_a_a", "f_b_proj": "in_a_b"}
OURS |= {f"{name}_proj": f"in_{name}" for name in "qkv"}
OURS |= {"g_a_proj": "in_z_a", "g_b_proj": "in_z_b", "o_norm": "norm", "o_proj": "out", "conv1d": "conv"}
LOW_RANK, BOUNDED = KimiDeltaAttention(3, 6, 4, 1e-6, 5), KimiDeltaAttention(2, 8, 4, 1e-6, None, bound=-5.0)
LAYERS = tuple(spec.LayerSpec((mixer,), FFN) for mixer in (LOW_RANK, BOUNDED, FULL))
NETWORK = spec.NetworkSpec("kda", 97, 32, LAYERS, NORM, True, 512, (), mtp=(spec.LayerSpec((FULL,), FFN),))
KERNELS = ["reference", "cpu", "triton", *(["native"] if compiled() else [])]


class Held:
    """Weights of a transformers layer, by our names."""

    def __init__(self, theirs: torch.nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in theirs.state_dict().items():
            parts = name.removeprefix("forget_gate.").split(".")
            self.tensors[".".join([OURS.get(parts[0], parts[0]), *parts[1:]])] = tensor

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self.tensors[name].view(shape).to(dtype or torch.float32)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.take(name, shape)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def within(self, prefix: str) -> Weights:
        return Scoped(self, prefix)


def theirs_and_ours(form: str) -> tuple[torch.nn.Module, KimiDeltaAttention]:
    """Make a random layer whose decays reach -30 unless bounded."""
    torch.manual_seed(0)
    theirs: torch.nn.Module
    if form == "kimi":
        theirs = KimiLinearDeltaAttention(KimiLinearConfig(**SIZES), 0)
        ours = KimiDeltaAttention(HEADS, SIZE, TAPS, EPS, gate_rank=SIZE)
    else:
        safe = {"kda_safe_gate": form == "ling", "kda_lower_bound": -5.0}
        theirs = BailingHybridDeltaAttention(BailingHybridConfig(**SIZES, **safe), 0)
        ours = KimiDeltaAttention(HEADS, SIZE, TAPS, EPS, None, bound=-5.0 if form == "ling" else None)
    for name, own in theirs.named_parameters():
        scale = 1.5 if name.endswith(("A_log", "dt_bias")) else 2.0 * own.shape[-1] ** -0.5
        own.data = (1 if "norm" in name else 0) + scale * torch.randn(own.shape)
    return theirs, ours


def memory_of() -> OneLayer:
    sizes = Layer(HEADS, HEADS, SIZE, SIZE, TAPS, 3 * HEADS * SIZE, torch.float32, by_key=True)
    memory = make_memory(sizes, [4])
    memory.state_SHKW[4], memory.window_SIC[4] = 0, 0
    return OneLayer(memory)


def run(layer: LoadedMixer, x_TD: Tensor, memory: OneLayer, kernels: str, **of: Any) -> Tensor:
    nothing = torch.zeros(0, dtype=torch.int64)
    group = build_group([of.pop("tree", chain(len(x_TD)))], [4], **of)
    return layer(x_TD, Step(Window(nothing, nothing, (group,), (0,)), memory, {}, load_kernels(kernels)))


@pytest.mark.parametrize(
    ("form", "kernels"),
    [*itertools.product(("kimi", "ling"), KERNELS), ("ling, unbounded", KERNELS[-1])],
)
@torch.inference_mode()
def test_a_layer_equals_transformers(form: str, kernels: str) -> None:
    """Chunks of 1, 3, 7 and 64, then a tree, whose paths are compared with texts."""
    theirs, ours = theirs_and_ours(form)
    layer = ours.build(Held(theirs), load_kernels(kernels), MixerPlacement(HIDDEN, HIDDEN))
    edges, width = ((0, 1, 4, 11, 75), 24) if kernels != "triton" else ((0, 1, 19), 7)
    text = edges[-1]
    x_TD = torch.randn(text + width, HIDDEN)
    expected_TD, memory = theirs(x_TD[None, :text])[0], memory_of()
    spans = itertools.pairwise(edges)
    found_TD = torch.cat([run(layer, x_TD[i:j], memory, kernels) for i, j in spans])
    tree = random_tree(width, seed=1)
    tree_TD = run(layer, x_TD[text:], memory, kernels, tree=tree, records=scattered(1, width, seed=2))
    for node in (width - 1, width // 2):
        path = [text + at for at in path_to(tree, node)]
        text_TD = torch.cat([x_TD[:text], x_TD[path]])
        expected_TD = torch.cat([expected_TD, theirs(text_TD[None])[0][-1:]])
        found_TD = torch.cat([found_TD, tree_TD[node : node + 1]])
    wrong = (found_TD - expected_TD).norm(dim=-1) / expected_TD.norm(dim=-1)
    assert float(wrong.max()) < LOGITS_RELATIVE


@pytest.mark.parametrize("kernels", KERNELS[1:])
@torch.inference_mode()
def test_no_decay_is_below_its_bound(kernels: str) -> None:
    """Inputs so large that most gates saturate: the state decays by e^-5 or not at all."""
    theirs, ours = theirs_and_ours("ling")
    x_TD = 3 * torch.randn(9, HIDDEN)
    layer, *others = (
        ours.build(Held(theirs), load_kernels(n), MixerPlacement(HIDDEN, HIDDEN))
        for n in (kernels, "reference")
    )
    found_TD, memory = run(layer, x_TD, own := memory_of(), kernels), own.recurrent(0)
    expected_TD = run(others[0], x_TD, plain := memory_of(), "reference")
    torch.testing.assert_close(found_TD, expected_TD, rtol=1e-3, atol=1e-3 * float(expected_TD.abs().max()))
    state_HKW, expected_HKW = memory.state_SHKW[4], plain.recurrent(0).state_SHKW[4]
    torch.testing.assert_close(
        state_HKW, expected_HKW, rtol=1e-3, atol=1e-3 * float(expected_HKW.abs().max())
    )
    assert state_HKW.isfinite().all() and state_HKW.abs().max() > 0


def test_a_record_is_a_small_part_of_a_state() -> None:
    """Update and decays in float32 and inputs in bfloat16: 2.7 % of a state of 128 by 128."""
    own = KimiDeltaAttention(32, 128, 4, 1e-5, gate_rank=128)
    figures = Layout((), (own.state_shape(),) * 20, torch.bfloat16).describe()
    assert figures.record_bytes == 20 * 32 * 128 * (4 + 4 + 3 * 2)
    assert 0.026 < figures.record_share < 0.0275


def test_texts_are_the_same_with_drafts() -> None:
    """Chains and trees, records and snapshots, with and without the prefix cache, and in C."""
    plain = texts(make(NETWORK, draft="none"))
    for drafts, slots in ((DRAFTS[1], "record"), (DRAFTS[1], "snapshot"), (DRAFTS[2], "record")):
        model = make(NETWORK, slots=slots, adaptive=False, prefix_cache=slots == "record", **drafts)
        assert texts(model) == plain
        assert model.core.stats().accepted > 10
    if compiled():
        native: dict[str, Any] = {"dtype": "float32", "kernels": "native"}
        drafted = texts(make(NETWORK, adaptive=False, **DRAFTS[0], **native))
        assert drafted == texts(make(NETWORK, draft="none", **native))
