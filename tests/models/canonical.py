"""The canonical tensors of a network, enumerated independently of the loader."""

from collections.abc import Iterator

from specdec.models import spec
from specdec.models.feed_forward import MLP, MoE
from specdec.models.mixers import (
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Lightning,
    Mamba1,
    Mamba2,
    SharedBlock,
    ShortConv,
)


def canonical(network: spec.NetworkSpec, *, mtp: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the canonical name and shape of each tensor of a network."""
    width = network.hidden
    yield "embed.weight", (network.vocab, width)
    yield "norm.weight", (width,)
    if not network.tied:
        yield "head.weight", (network.vocab, width)
    for i, layer in enumerate(network.layers):
        yield from _layer(f"layers.{i}", layer, width)
    if mtp:
        for name in ("embed_norm", "hidden_norm", "norm"):
            yield f"mtp.{name}.weight", (width,)
        yield "mtp.fc.weight", (width, 2 * width)
        for i, layer in enumerate(network.mtp):
            yield from _layer(f"mtp.layers.{i}", layer, width)


def _layer(at: str, layer: spec.LayerSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    parts = {
        Attention: _attention,
        GatedDeltaNet: _delta_net,
        Lightning: _lightning,
        KimiDeltaAttention: _kda,
        LatentAttention: _latent,
        Mamba1: _mamba1,
        Mamba2: _mamba,
        SharedBlock: _own_of_block if layer.shares is not None else _block,
        ShortConv: _short_conv,
    }
    for i, mixer in enumerate(layer.mixers):
        for name, shape in parts[type(mixer)](mixer, width).items():
            yield f"{at}.mixer{i + 1 if i else ''}.{name}", shape
    for half, frame in (("mixer", layer.frame), ("ffn", layer.ffn_frame)):
        if layer.mixers if half == "mixer" else layer.ffn:
            norms = {"norm": frame.pre, "post_norm": frame.post}
            yield from ((f"{at}.{half}_{name}.weight", (width,)) for name, there in norms.items() if there)
    if layer.ffn:
        dense = isinstance(layer.ffn, MLP)
        for name, shape in (_dense(layer.ffn, width) if dense else _experts(layer.ffn, width)).items():
            yield f"{at}.ffn.{name}", shape


def _attention(m: Attention, width: int) -> dict[str, tuple[int, ...]]:
    rows = {"q": m.heads * m.head_dim * (1 + m.gated), "k": m.kv_heads * m.head_dim}
    rows |= {"v": rows["k"], "o": width}
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (r, width) for n, r in rows.items()}
    shapes["o.weight"] = (width, m.heads * m.head_dim)
    if m.head_gate:
        shapes["gate.weight"] = (m.heads, width)
    if m.bias:
        shapes |= {f"{n}.bias": (r,) for n, r in rows.items() if n != "o" or m.out_bias}
    if m.qk_norm:
        heads = (m.heads, m.kv_heads) if m.norm_whole else (1, 1)
        shapes |= {f"{n}_norm.weight": (h * m.head_dim,) for n, h in zip("qk", heads, strict=True)}
    return shapes


def _own_of_block(m: SharedBlock, width: int) -> dict[str, tuple[int, ...]]:
    """Yield the tensors that belong to each use of a shared block."""
    inputs = dict.fromkeys("qkv" if m.adapts_attention else "", 2 * width) | ({"up": width} if m.rank else {})
    outputs = {"up": 2 * m.ffn.width}
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (width, width)}
    for name, size in inputs.items():
        shapes[f"{name}_adapter.in.weight"] = m.rank, size
        shapes[f"{name}_adapter.out.weight"] = outputs.get(name, 2 * width), m.rank
    return shapes


def _block(m: SharedBlock, width: int) -> dict[str, tuple[int, ...]]:
    attention = _attention(m.attention, 2 * width)
    attention["o.weight"] = width, m.attention.heads * m.attention.head_dim
    shared = {f"attention.{name}": shape for name, shape in attention.items()}
    shared |= {f"ffn.{name}": shape for name, shape in _dense(m.ffn, width).items()}
    shared |= {"norm.weight": (2 * width,), "ffn_norm.weight": (width,)}
    return _own_of_block(m, width) | {f"shared.{name}": shape for name, shape in shared.items()}


def _delta_net(m: GatedDeltaNet, width: int) -> dict[str, tuple[int, ...]]:
    value, channels = m.value_heads * m.value_dim, 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim
    key = m.key_heads * m.key_dim
    apart = {"in_q.weight": (key, width), "in_k.weight": (key, width), "in_v.weight": (value, width)}
    return {
        **(apart if m.apart else {"in_qkv.weight": (channels, width)}),
        "in_z.weight": (value, width),
        "in_b.weight": (m.value_heads, width),
        "in_a.weight": (m.value_heads, width),
        "out.weight": (width, value),
        "conv.weight": (channels, m.conv),
        "A_log": (m.value_heads,),
        "dt_bias": (m.value_heads,),
        "norm.weight": (m.value_dim,),
    }


def _lightning(m: Lightning, width: int) -> dict[str, tuple[int, ...]]:
    inner = m.heads * m.head_dim
    return {
        "in.weight": (3 * inner, width),
        "gate.weight": (inner, width),
        "norm.weight": (inner,),
        "out.weight": (width, inner),
    }


def _kda(m: KimiDeltaAttention, width: int) -> dict[str, tuple[int, ...]]:
    inner = m.heads * m.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"in_{name}.weight": (inner, width) for name in "qkv"}
    shapes |= {"in_b.weight": (m.heads, width), "out.weight": (width, inner)}
    shapes |= {"conv.weight": (3 * inner, m.conv), "A_log": (m.heads,), "dt_bias": (m.heads, m.head_dim)}
    for name in ("in_z", "in_a"):
        if m.gate_rank is None:
            shapes[f"{name}.weight"] = inner, width
        else:
            shapes |= {f"{name}_a.weight": (m.gate_rank, width), f"{name}_b.weight": (inner, m.gate_rank)}
    return shapes | {"norm.weight": (m.head_dim,)}


def _latent(m: LatentAttention, width: int) -> dict[str, tuple[int, ...]]:
    queries, shapes = m.heads * (m.own_dim + m.shared_dim), dict[str, tuple[int, ...]]()
    if m.q_rank is None:
        shapes["q.weight"] = queries, width
    else:
        shapes |= {"q_a.weight": (m.q_rank, width), "q_norm.weight": (m.q_rank,)}
        shapes["q_b.weight"] = queries, m.q_rank
    shapes |= {"kv_a.weight": (m.kv_rank + m.shared_dim, width), "kv_norm.weight": (m.kv_rank,)}
    if m.gated:
        shapes["gate.weight"] = m.heads, width
    shapes["kv_b.weight"] = m.heads, m.own_dim + m.value_dim, m.kv_rank
    return shapes | {"o.weight": (width, m.heads * m.value_dim)}


def _mamba1(m: Mamba1, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "in.weight": (2 * m.inner, width),
        "conv.weight": (m.inner, m.conv),
        "x.weight": (m.heads * sum(m.selected.values()), m.inner // m.heads),
        "dt.weight": (m.inner, m.rank),
        "dt_bias": (m.inner,),
        "A_log": (m.inner, m.state_dim),
        "D": (m.inner,),
        "out.weight": (width, m.inner),
    }
    if m.norms == "weighted":
        shapes |= {f"{name}_norm.weight": (size,) for name, size in m.selected.items()}
    if m.conv_bias:
        shapes["conv.bias"] = (m.inner,)
    return shapes | ({"in.bias": (2 * m.inner,), "out.bias": (width,)} if m.bias else {})


def _mamba(m: Mamba2, width: int) -> dict[str, tuple[int, ...]]:
    inner = m.heads * m.head_dim
    channels = inner + 2 * m.groups * m.state_dim
    rows = inner + channels + m.heads
    shapes: dict[str, tuple[int, ...]] = {"in.weight": (rows, width), "out.weight": (width, inner)}
    shapes["conv.weight"] = channels, m.conv
    if m.norm != "none":
        shapes["norm.weight"] = (inner,)
    shapes |= dict.fromkeys(("A_log", "D", "dt_bias"), (m.heads,))
    if m.conv_bias:
        shapes["conv.bias"] = (channels,)
    if m.bias if m.out_bias is None else m.out_bias:
        shapes["out.bias"] = (width,)
    return shapes | ({"in.bias": (rows,)} if m.bias else {})


def _short_conv(m: ShortConv, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"in.weight": (3 * m.channels, width)}
    shapes |= {"conv.weight": (m.channels, m.conv), "out.weight": (width, m.channels)}
    biases = {"in.bias": (3 * m.channels,), "conv.bias": (m.channels,), "out.bias": (width,)}
    return shapes | (biases if m.bias else {})


def _dense(f: MLP, width: int) -> dict[str, tuple[int, ...]]:
    ups = ("up",) if f.activation == "relu2" else ("gate", "up")
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (f.width, width) for n in ups}
    shapes["down.weight"] = (width, f.width)
    if f.bias:
        shapes |= {f"{n}.bias": (f.width,) for n in ups} | {"down.bias": (width,)}
    return shapes


def _experts(f: MoE, width: int) -> dict[str, tuple[int, ...]]:
    inner, rows = f.latent or width, f.width * (2 if f.activation == "swiglu" else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "router.weight": (f.experts, width),
        "experts.up": (f.experts, rows, inner),
        "experts.down": (f.experts, inner, f.width),
    }
    if f.router == "sigmoid" and f.corrected:
        shapes["router.correction"] = (f.experts,)
    if f.latent:
        shapes |= {"latent_in.weight": (inner, width), "latent_out.weight": (width, inner)}
    shared = _dense(f.shared, width) if f.shared else {}
    shapes |= {f"shared.{name}": shape for name, shape in shared.items()}
    return shapes | ({"shared_gate.weight": (1, width)} if f.shared_gate else {})
