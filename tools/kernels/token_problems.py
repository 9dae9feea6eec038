"""Problems of per-token operations: products, norms, experts, sampling."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix, expert_of, widen
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.table import Kernels, on_gpu
from specdec.models import spec
from specdec.models.feed_forward import MLP, FeedForward, MoE
from specdec.models.formats import FORMATS, WHOLE
from specdec.models.mixers import GatedDeltaNet, KimiDeltaAttention, Lightning, Mamba2, Mixer
from tools.kernels import traffic
from tools.kernels.problems import (
    SAMPLED,
    Bench,
    Planned,
    Problem,
    Sizes,
    by_token,
    row_error,
    sample,
)

MOST_CHOSEN = 256
"""Maximum tokens whose logits the loop holds at once."""
WIDE = ("router", "head")
"""Products whose weights are not quantized; the head also has an int8 format."""
PICK = "sample"
CHECKED_VOCAB = 4096
"""Vocabulary cut for the reference, which sorts and mixes in Python integers."""


def plan(bench: Bench, sizes: Sizes) -> Iterator[Planned]:
    """List the problems of a shape at one load."""
    s, tokens, item = sizes.network, sizes.tokens, bench.dtype.itemsize
    for (name, (out, inner)), form in itertools.product(matrices(s).items(), formats(bench)):
        if form is None or name not in WIDE or (name == "head" and form == "int8"):
            size = _weight_bytes((out, inner), item, form)
            shown = f"{name} {out}x{inner}{_named(form)}"
            needs = bench.sets(size) * size + (4 if form in WHOLE else 2) * out * inner * traffic.WIDE
            yield sizes.plan("linear", shown, needs, partial(_linear, bench, tokens, out, inner, form))
    for operation in ("rms_norm", "add_rms_norm"):
        build = partial(_norm, bench, operation, tokens, s.hidden, s.norm.eps)
        yield sizes.plan(operation, f"{s.hidden}", 0, build)
    for mixer in {mixer.kind: mixer for layer in s.layers for mixer in layer.mixers}.values():
        yield from _plan_mixer(bench, sizes, mixer)
    for ffn in {layer.ffn.kind: layer.ffn for layer in s.layers if layer.ffn}.values():
        yield from _plan_feed_forward(bench, sizes, ffn)
    chosen = min(tokens, MOST_CHOSEN)
    needs = 8 * traffic.WIDE * chosen * s.vocab
    for operation, make in SAMPLING.items():
        if hasattr(bench.kernels, operation):
            build = partial(make, bench, chosen, s.vocab)
            yield sizes.plan(operation, f"{chosen} x {s.vocab}", needs, build)


def _plan_mixer(bench: Bench, sizes: Sizes, mixer: Mixer) -> Iterator[Planned]:
    match mixer:
        case GatedDeltaNet() as m:
            width, run = m.value_heads * m.value_dim, m.value_dim
        case KimiDeltaAttention() as m:
            width, run = m.width, m.head_dim
        case Lightning() as m:
            width, run = m.inner, m.inner
        case Mamba2() as m:
            width, run = m.heads * m.head_dim, m.heads * m.head_dim // m.groups
        case _:
            return
    gates = {
        "gate_first": isinstance(mixer, Mamba2),
        "sigmoid": isinstance(mixer, KimiDeltaAttention | Lightning),
    }
    build = partial(_gated_norm, bench, sizes.tokens, width, run, **gates)
    yield sizes.plan("gated_norm", f"{width} by {run}", 0, build)


def _plan_feed_forward(bench: Bench, sizes: Sizes, ffn: FeedForward) -> Iterator[Planned]:
    match ffn:
        case MLP():
            build = partial(_activation, bench, ffn.activation, sizes.tokens, ffn.width)
            yield sizes.plan(ffn.activation, f"{ffn.width}", 0, build)
        case MoE():
            inner, detail = ffn.latent or sizes.network.hidden, f"{ffn.top_k} of {ffn.experts}"
            build = partial(_route, bench, ffn, sizes.tokens)
            yield sizes.plan(f"route_{ffn.router}", detail, 0, build)
            item = bench.dtype.itemsize
            for form in formats(bench):
                shown = f"{detail}, {inner}x{ffn.width}{_named(form)}"
                build = partial(_experts, bench, ffn, inner, sizes.tokens, form)
                needs = ffn.experts * _expert_bytes(ffn, inner, item, None)
                needs += ffn.experts * _expert_bytes(ffn, inner, item, form) if form else 0
                yield sizes.plan("experts", shown, needs * (2 if form in WHOLE else 1), build)


def formats(bench: Bench) -> tuple[str | None, ...]:
    """Return the formats of large matrices to measure; None is the activations' own dtype."""
    if bench.dtype.itemsize > 2:
        return (None,)
    return (None, *FORMATS) if on_gpu(bench.kernels.name) else (None, "fp8")


def _named(form: str | None) -> str:
    return f" {form}" if form else ""


def _weight_bytes(shape: tuple[int, ...], item: int, form: str | None) -> int:
    return FORMATS[form].num_bytes(shape) if form else prod(shape) * item


def _expert_bytes(moe: MoE, inner: int, item: int, form: str | None) -> int:
    up = moe.width * (2 if moe.activation == "swiglu" else 1), inner
    return _weight_bytes(up, item, form) + _weight_bytes((inner, moe.width), item, form)


def _held(weight: Tensor, form: str | None) -> Matrix:
    return FORMATS[form].quantise(weight) if form else weight


def matrices(s: spec.NetworkSpec) -> dict[str, tuple[int, int]]:
    """Return the products of a step and their weights' sizes [out, inner], as the layers pack them."""
    found = {
        name: size
        for layer in s.layers
        for part in layer.parts
        for name, size in part.matrices(s.hidden).items()
    }
    return found | {"head": (s.vocab, s.hidden)}


def _linear(bench: Bench, tokens: int, out: int, inner: int, form: str | None) -> Problem:
    item = bench.dtype.itemsize
    weight_bytes = _weight_bytes((out, inner), item, form)
    x_TD, rows = bench.draw(tokens, inner, seed=99), sample(tokens)
    columns = torch.linspace(0, out - 1, min(out, SAMPLED)).long()
    packed: list[Any] = []
    checked: list[Tensor] = []
    for i in range(bench.sets(weight_bytes)):
        held = _held(bench.draw(out, inner, seed=i, scale=inner**-0.5), form)
        if not checked:
            checked.append(widen(held)[columns.to(bench.device)].cpu())
        packed.append(bench.kernels.pack(held))

    def error() -> float:
        found_RN = bench.kernels.linear(x_TD, packed[0])[rows].cpu()[:, columns]
        reference = bench.reference
        return row_error(found_RN, reference.linear(x_TD[rows].cpu(), reference.pack(checked[0])))

    size = traffic.linear(tokens, out, inner, item, weight_bytes)
    return Problem(size, [partial(bench.kernels.linear, x_TD, own) for own in packed], error)


def _norm(bench: Bench, operation: str, tokens: int, size: int, eps: float) -> Problem:
    weight_D = 1 + bench.draw(size, dtype=torch.float32, seed=5, scale=0.1)
    adds = operation == "add_rms_norm"
    inputs = [
        [bench.draw(tokens, size, seed=2 * i), bench.draw(tokens, size, seed=2 * i + 1)] for i in range(4)
    ]
    moved = traffic.pointwise(*[(tokens, size)] * (4 if adds else 2), item=bench.dtype.itemsize)

    def run(ops: Kernels, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor) -> Tensor:
        return ops.add_rms_norm(x_TD, y_TD, weight_D, eps) if adds else ops.rms_norm(x_TD, weight_D, eps)

    return by_token(bench, moved, run, inputs, weight_D)


def _gated_norm(
    bench: Bench, tokens: int, width: int, group: int, *, gate_first: bool, sigmoid: bool
) -> Problem:
    weight_D = 1 + bench.draw(width if gate_first else group, seed=5, scale=0.1)
    inputs = [
        [
            bench.draw(tokens, width, dtype=torch.float32, seed=2 * i),
            bench.draw(tokens, width, seed=2 * i + 1),
        ]
        for i in range(4)
    ]
    item = bench.dtype.itemsize
    moved = traffic.pointwise((tokens, width), item=traffic.WIDE + 2 * item)

    def run(ops: Kernels, x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor) -> Tensor:
        return ops.gated_norm(x_TD, gate_TD, weight_D, 1e-6, group, gate_first=gate_first, sigmoid=sigmoid)

    return by_token(bench, moved, run, inputs, weight_D)


def _activation(bench: Bench, operation: str, tokens: int, width: int) -> Problem:
    columns = 2 * width if operation == "swiglu" else width
    inputs = [[bench.draw(tokens, columns, seed=i)] for i in range(4)]
    moved = traffic.pointwise((tokens, columns), (tokens, width), item=bench.dtype.itemsize)
    return by_token(bench, moved, lambda ops, x_TI: getattr(ops, operation)(x_TI), inputs)


def _route(bench: Bench, moe: MoE, tokens: int) -> Problem:
    sigmoid = moe.router == "sigmoid"
    logits_TE = bench.draw(
        tokens, moe.experts, dtype=torch.float32 if sigmoid and not moe.narrow_router else None
    )
    bias_E = bench.draw(moe.experts, dtype=torch.float32, seed=1, scale=0.1)

    def route(ops: Kernels, logits_TE: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        if not sigmoid:
            return ops.route_softmax(logits_TE, moe.top_k, renormalise=moe.renormalise)
        return ops.route_sigmoid(
            logits_TE,
            bias_E,
            moe.top_k,
            groups=moe.groups,
            top_groups=moe.top_groups,
            renormalise=moe.renormalise,
            scale=moe.scale,
            eps=moe.eps,
        )

    def chosen(ops: Kernels, logits_TE: Tensor, bias_E: Tensor) -> Tensor:
        """Return weights and logits of the chosen experts, sorted: ties may be chosen in any order."""
        index_TA, weight_TA = route(ops, logits_TE, bias_E)
        chosen_TA = logits_TE.gather(1, index_TA.long())
        return torch.cat([x_TA.float().sort(-1).values for x_TA in (weight_TA, chosen_TA)], dim=1)

    moved = traffic.pointwise((tokens, moe.experts), item=logits_TE.element_size())
    error = by_token(bench, moved, chosen, [[logits_TE]], bias_E).error
    return Problem(moved, [lambda: route(bench.kernels, logits_TE, bias_E)], error)


def _experts(bench: Bench, moe: MoE, inner: int, tokens: int, form: str | None) -> Problem:
    gated, item = moe.activation == "swiglu", bench.dtype.itemsize
    rows = moe.width * (2 if gated else 1)
    up, down = (
        _held(weight_END, form)
        for weight_END in (
            bench.draw(moe.experts, rows, inner, scale=inner**-0.5),
            bench.draw(moe.experts, inner, moe.width, seed=1, scale=moe.width**-0.5),
        )
    )
    up_EID, down_EDI = bench.kernels.pack_experts(up), bench.kernels.pack_experts(down)
    x_TD = bench.draw(tokens, inner, seed=2)
    # Different experts in each set: the same ones would be cached.
    chosen = min(moe.experts, tokens * moe.top_k)
    expert_bytes = _expert_bytes(moe, inner, item, form)
    sets = bench.sets(traffic.experts(inner, 0, chosen, item, expert_bytes))
    scores_STE = torch.rand(sets, tokens, moe.experts, generator=torch.Generator().manual_seed(0))
    index_STA = scores_STE.topk(moe.top_k, dim=-1).indices.to(bench.device)
    distinct = sum(len(torch.unique(index_TA)) for index_TA in index_STA) // sets
    weight_TA = torch.softmax(bench.draw(tokens, moe.top_k, seed=3).float(), -1).to(bench.dtype)
    size = traffic.experts(inner, tokens, distinct, item, expert_bytes)

    def call(index_TA: Tensor) -> Tensor:
        return bench.kernels.experts(x_TD, up_EID, down_EDI, index_TA, weight_TA, gated=gated)

    def error() -> float:
        few = sample(tokens)
        held, index_RA = torch.unique(index_STA[0, few], return_inverse=True)
        up_EID, down_EDI = (
            bench.reference.pack_experts(torch.stack([widen(expert_of(own, e)).cpu() for e in held.tolist()]))
            for own in (up, down)
        )
        expected = bench.reference.experts(
            x_TD[few].cpu(), up_EID, down_EDI, index_RA.cpu(), weight_TA[few].cpu(), gated=gated
        )
        return row_error(call(index_STA[0])[few], expected)

    return Problem(size, [partial(call, own) for own in index_STA], error)


def _gumbel(bench: Bench, tokens: int, vocab: int) -> Problem:
    seed_N = torch.arange(tokens, device=bench.device) * 0x9E3779B9
    position_N = torch.arange(tokens, device=bench.device) + 1000
    rows, checked = sample(tokens), min(vocab, CHECKED_VOCAB)

    def call() -> Tensor:
        return bench.kernels.gumbel(seed_N, position_N, vocab)

    def error() -> float:
        expected = bench.reference.gumbel(seed_N[rows].cpu(), position_N[rows].cpu(), checked)
        return row_error(call()[rows][:, :checked], expected)

    return Problem(traffic.pointwise((tokens, vocab), item=traffic.WIDE), [call], error)


def _process(bench: Bench, tokens: int, vocab: int) -> Problem:
    def rules(rows: int, device: torch.device) -> Rules:
        return Rules(
            temperature_N=torch.full((rows,), 0.8, device=device),
            top_k_N=torch.full((rows,), 50, device=device),
            top_p_N=torch.full((rows,), 0.95, device=device),
            min_p_N=torch.full((rows,), 0.01, device=device),
        )

    logits_NV = bench.draw(tokens, vocab, dtype=torch.float32, scale=3.0)
    own, rows, checked = rules(tokens, bench.device), sample(tokens), min(vocab, CHECKED_VOCAB)

    def error() -> float:
        excerpt_NV = logits_NV[:, :checked].contiguous()
        found_NV = bench.kernels.process(excerpt_NV, own)[rows].cpu()
        expected_NV = bench.reference.process(excerpt_NV[rows].cpu(), rules(len(rows), torch.device("cpu")))
        if not torch.equal(found_NV.isinf(), expected_NV.isinf()):
            return float("inf")
        return row_error(found_NV.nan_to_num(neginf=0.0), expected_NV.nan_to_num(neginf=0.0))

    moved = traffic.pointwise((tokens, vocab), item=2 * traffic.WIDE)
    return Problem(moved, [lambda: bench.kernels.process(logits_NV, own)], error, asks=True)


def _pick(bench: Bench, tokens: int, vocab: int) -> Problem:
    """Sample with temperature and without filters, from logits and noise in one operation."""
    pick: Callable[..., Tensor] = getattr(bench.kernels, PICK)
    logits_NV = bench.draw(tokens, vocab, dtype=torch.float32, scale=3.0)
    own = Rules(temperature_N=torch.full((tokens,), 0.8, device=bench.device))
    number_N = torch.arange(tokens, device=bench.device)
    rows, checked = sample(tokens), min(vocab, CHECKED_VOCAB)

    def error() -> float:
        """Return the gap between the chosen token's score and the best one."""
        excerpt_NV = logits_NV[:, :checked].contiguous()
        found_R = pick(excerpt_NV, own, number_N, number_N)[rows].cpu()
        few = Rules(temperature_N=own.temperature_N[rows].cpu())
        scores_RV = bench.reference.process(excerpt_NV[rows].cpu(), few)
        scores_RV += bench.reference.gumbel(number_N[rows].cpu(), number_N[rows].cpu(), checked)
        gap_R = scores_RV.amax(-1) - scores_RV.gather(1, found_R.long()[:, None])[:, 0]
        return float(gap_R.max())

    moved = traffic.pointwise((tokens, vocab), item=traffic.WIDE)
    return Problem(moved, [lambda: pick(logits_NV, own, number_N, number_N)], error)


SAMPLING = {"gumbel": _gumbel, "process": _process, PICK: _pick}
"""Operations over a vocabulary; a kernel set may lack some."""
