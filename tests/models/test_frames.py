"""Residual frames of layers: their equations, and that drafts change no text in any of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.tape import REFUSED
from specdec.kernels.table import load_kernels
from specdec.models import spec
from specdec.models.feed_forward import MLP
from specdec.models.frame import LoadedHalfLayer
from specdec.models.mixers import Attention, GatedDeltaNet, Mamba1, Mamba2, SharedBlock
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.spec import POST_NORM, PRE_NORM, SANDWICH, Frame
from specdec.models.weights import RandomWeights
from tests.models.test_probe_mixer import make, texts

WIDTH, NORM = 12, Norm(1e-5)
NORMALISED = Frame(outputs=(0.7,), keep=1.3, keeps_normed=True)
PAIR = Frame(inputs=(1.25, 0.5), outputs=(0.3, 0.9))
FRAMES = {
    "pre": PRE_NORM,
    "post": POST_NORM,
    "sandwich": replace(SANDWICH, inputs=(0.5,), outputs=(0.25,)),
    "normalised residual": NORMALISED,
    "pair": PAIR,
    "side": Frame(outputs=(0.5,), side=True),
}


class Uneven(RandomWeights):
    """Weights whose norms are not all one, so that a skipped norm fails."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        taken = super().take(name, shape, dtype)
        return taken + 0.2 * self._normal(name, shape, 1.0).to(taken) if "norm" in name else taken


def normalise(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, NORM.eps)


@pytest.mark.parametrize("kernels", ["reference", "cpu", "native"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_half_follows_its_equation(name: str, kernels: str) -> None:
    """The stream becomes keep x' + post(Σ o f(i r)), r = pre(x), x' = r or x; x includes pending outputs."""
    frame = FRAMES[name]
    parts = [lambda x, _: torch.tanh(x), lambda x, _: x.flip(-1) ** 2][: len(frame.inputs)]
    weights = Uneven(0, torch.float64)
    side = [lambda x, _: torch.sin(x)] if frame.side else []
    half = LoadedHalfLayer(
        frame, [*side, *parts], NORM, weights, load_kernels(kernels), name="mixer", hidden=WIDTH
    )
    drawn = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_TD, waiting_TD = drawn.unbind()
    for added_TD in (None, waiting_TD):
        whole_TD = x_TD if added_TD is None else x_TD + added_TD
        read_TD = whole_TD + torch.sin(whole_TD) if frame.side else whole_TD
        if frame.pre:
            read_TD = normalise(read_TD, weights.take("mixer_norm.weight", (WIDTH,), torch.float64))
        given_TD = sum(
            (
                o * part(i * read_TD, None)
                for part, i, o in zip(parts, frame.inputs, frame.outputs, strict=True)
            ),
            torch.zeros(()),
        )
        if frame.post:
            post_D = weights.take("mixer_post_norm.weight", (WIDTH,), torch.float64)
            given_TD = normalise(given_TD, post_D)
        kept_TD = read_TD if frame.keeps_normed else whole_TD
        found_TD, found_added_TD = half(x_TD.clone(), added_TD, None)  # type: ignore[arg-type]
        torch.testing.assert_close(found_TD + found_added_TD, frame.keep * kept_TD + given_TD)


def test_a_float32_residual_is_rounded_at_its_readers() -> None:
    narrow = torch.bfloat16
    weights, ops = Uneven(0, narrow), load_kernels("native")
    norm = Norm(1e-5, wide=False)
    parts = (lambda x, _: x * 3,)
    half = LoadedHalfLayer(PRE_NORM, parts, norm, weights, ops, name="ffn", hidden=WIDTH, narrow=narrow)
    x_TD, added_TD = torch.randn(5, WIDTH), torch.randn(5, WIDTH).to(narrow)
    stream_TD, out_TD = half(x_TD, added_TD, None)  # type: ignore[arg-type]
    assert stream_TD.dtype == torch.float32 and out_TD.dtype == narrow
    assert torch.equal(stream_TD, x_TD + added_TD.float())
    expected_TD = ops.rms_norm(stream_TD.to(narrow), weights.take("ffn_norm.weight", (WIDTH,)), 1e-5) * 3
    assert torch.equal(out_TD, expected_TD)


ATTENTION = Attention(4, 2, 8, 0.25, Rope(4, 1e4), None, gated=False)
MAMBA = Mamba2(4, 8, 2, 6, 4, True, False, 1e-5, (0.0, 1e9))
SELECTIVE = Mamba1(64, 6, 4, 4, conv_bias=True, bias=False, heads=2)
DELTA = GatedDeltaNet(2, 4, 8, 8, 4, 1e-6)
FFN = MLP(40, "swiglu")
BLOCK = SharedBlock(Attention(2, 2, 32, 0.25, None, None, gated=False), MLP(40, "geglu"), NORM, 4, True)
NETWORK = spec.NetworkSpec(
    "frames",
    97,
    32,
    (
        spec.LayerSpec((MAMBA, ATTENTION), FFN, frame=PAIR, ffn_frame=Frame(outputs=(0.6,))),
        spec.LayerSpec((ATTENTION,), FFN, frame=POST_NORM, ffn_frame=POST_NORM),
        spec.LayerSpec((DELTA,), FFN, frame=NORMALISED, ffn_frame=SANDWICH),
        spec.LayerSpec((BLOCK, MAMBA), None, frame=Frame(side=True)),
        spec.LayerSpec((MAMBA,), None),
        spec.LayerSpec((BLOCK, SELECTIVE), None, frame=Frame(side=True), shares=3),
    ),
    NORM,
    tied=True,
    max_length=512,
    eos=(),
    mtp=(spec.LayerSpec((ATTENTION,), FFN),),
    embed_scale=12.0,
    logit_scale=0.125,
    wide_residual=True,
)
DRAFTS: tuple[Mapping[str, Any], ...] = (
    {"draft": "mtp", "num_steps": 3, "topk": 1},
    {"draft": "mtp", "num_steps": 3, "topk": 3, "num_draft_tokens": 9, "slots": "snapshot"},
    {"draft": "suffix", "prefix_cache": True},
)


def test_texts_are_the_same_with_drafts_in_every_frame() -> None:
    plain = texts(make(NETWORK, draft="none"))
    for drafts in DRAFTS:
        model = make(NETWORK, adaptive=False, **drafts)
        assert texts(model) == plain
        assert model.core.stats().accepted > 10


def test_logits_and_embeddings_are_scaled() -> None:
    """Greedy texts depend on the scale of embeddings and not on that of logits; sampled ones on both."""
    plain = texts(make(NETWORK, draft="none"))
    others = [
        texts(make(replace(NETWORK, **{field: 1.0}), draft="none"))
        for field in ("logit_scale", "embed_scale")
    ]
    assert [other == plain for other in others] == [False, False]
    greedy = {key: text for key, text in plain.items() if not key[1]}
    assert greedy == {key: others[0][key] for key in greedy} != {key: others[1][key] for key in greedy}


@pytest.mark.skipif(not compiled(), reason="there is no C compiler")
@pytest.mark.parametrize("wide", [False, True])
def test_passes_of_every_frame_are_recorded(wide: bool) -> None:
    """Refused recordings would only be slower, so no text would show them."""
    network = replace(NETWORK, wide_residual=wide)
    model = make(network, dtype="bfloat16", kernels="native", draft="none")
    first, again = texts(model), texts(model)
    assert first == again
    (tapes,) = model.network._replays._by_memory.values()
    assert tapes.sizes()[0] > 0 and REFUSED not in tapes._by_key.values()
