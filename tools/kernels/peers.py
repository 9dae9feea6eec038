"""The gated delta rule of other packages, if installed, on equivalent states and tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.gates.reference import delta_gates, l2_normalise
from specdec.models.mixers import GatedDeltaNet
from tools.kernels import traffic
from tools.kernels.problems import Bench, Planned, Problem, Sizes, on_cpu, row_error, sample
from tools.kernels.recurrent_layers import DECAY


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of T tokens, each with its own state."""

    q_BTGK: Tensor
    k_BTGK: Tensor
    v_BTHW: Tensor
    a_BTH: Tensor
    b_BTH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    state_BHKW: Tensor

    def gates(self) -> tuple[Tensor, Tensor]:
        """Return the log-decay and the write strength [B, T, H]."""
        decay_TH, beta_BTH = delta_gates(self.b_BTH, self.a_BTH, self.A_log_H, self.dt_bias_H)
        return decay_TH.view(beta_BTH.shape), beta_BTH

    def repeated(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys repeated for every value head, as most other packages need them."""
        times = self.v_BTHW.shape[2] // self.q_BTGK.shape[2]
        return self.q_BTGK.repeat_interleave(times, 2), self.k_BTGK.repeat_interleave(times, 2)


Prepared = Callable[[], Tensor]


def _flash_linear(name: str, own: Inputs) -> Prepared:
    import fla.ops.gated_delta_rule as ops  # type: ignore[import-not-found]

    return _delta_rule(getattr(ops, name), own, initial_state=own.state_BHKW)


def _transformers(name: str, own: Inputs) -> Prepared:
    from transformers.models.qwen3_next import modeling_qwen3_next as ops

    return _delta_rule(getattr(ops, name), own, initial_state=own.state_BHKW)


def _delta_rule(function: Callable[..., Any], own: Inputs, **state: Tensor) -> Prepared:
    (q, k), (g, beta) = own.repeated(), own.gates()
    settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    beta = beta.to(q.dtype)

    def run() -> Tensor:
        out: Tensor = function(q, k, own.v_BTHW, g=g, beta=beta, **state, **settings)[0]
        return out

    return run


def _flashinfer(name: str, own: Inputs) -> Prepared:
    from flashinfer import gdn_decode

    state_BHWK = own.state_BHKW.transpose(2, 3).contiguous()
    index_B = torch.arange(len(state_BHWK), dtype=torch.int32, device=state_BHWK.device)
    fed = own.q_BTGK, own.k_BTGK, own.v_BTHW, state_BHWK, index_B

    def run() -> Tensor:
        out: Tensor = getattr(gdn_decode, name)(
            *fed,
            own.A_log_H,
            own.a_BTH,
            own.dt_bias_H,
            own.b_BTH,
            disable_state_update=False,
            use_qk_l2norm=True,
        )[0]
        return out

    return run


PEERS: dict[str, tuple[str, Callable[[str, Inputs], Prepared]]] = {
    "fused_recurrent_gated_delta_rule": ("fla", _flash_linear),
    "chunk_gated_delta_rule": ("fla", _flash_linear),
    "gated_delta_rule_mtp": ("flashinfer", _flashinfer),
    "torch_recurrent_gated_delta_rule": ("transformers", _transformers),
}
"""Package and function by the peer's function name. Peers have no drafts: none supports trees."""


def absent() -> list[str]:
    """Return the packages that cannot be imported here."""
    return sorted({package for package, _ in PEERS.values() if find_spec(package) is None})


def plan(bench: Bench, sizes: Sizes) -> Iterator[Planned]:
    """List the peers' problems for a shape with gated delta nets."""
    mixers = [mixer for mixer in sizes.network.mixers() if isinstance(mixer, GatedDeltaNet)]
    missing = absent()
    for name, (package, prepare) in PEERS.items():
        if mixers and package not in missing:
            m = mixers[0]
            size = traffic.recurrent(m.state_shape(), bench.dtype.itemsize)
            needs = 3 * bench.sets(2 * sizes.batch * size.state) * sizes.batch * size.state
            detail = f"{m.value_heads}x{m.key_dim}x{m.value_dim} plain"
            build = partial(_build, bench, sizes, m, name, prepare)
            yield sizes.plan(f"{package}.{name}", detail, needs, build)


def _build(
    bench: Bench, sizes: Sizes, m: GatedDeltaNet, name: str, prepare: Callable[[str, Inputs], Prepared]
) -> Problem:
    rows, width = sizes.batch, sizes.window
    size = traffic.recurrent(m.state_shape(), bench.dtype.itemsize)
    tokens = traffic.pointwise(
        (rows, width, 2 * m.key_heads * m.key_dim + 2 * m.value_heads * m.value_dim),
        item=bench.dtype.itemsize,
    )
    moved = traffic.scan_window(size, rows, width, 0, "plain") + tokens

    def draw(seed: int) -> Inputs:
        wide = torch.float32
        return Inputs(
            bench.draw(rows, width, m.key_heads, m.key_dim, seed=seed),
            bench.draw(rows, width, m.key_heads, m.key_dim, seed=seed + 1),
            bench.draw(rows, width, m.value_heads, m.value_dim, seed=seed + 2),
            bench.draw(rows, width, m.value_heads, seed=seed + 3),
            bench.draw(rows, width, m.value_heads, seed=seed + 4),
            bench.draw(m.value_heads, dtype=wide, seed=5, scale=DECAY),
            bench.draw(m.value_heads, dtype=wide, seed=6, scale=DECAY),
            bench.draw(rows, m.value_heads, m.key_dim, m.value_dim, dtype=wide, seed=seed + 7, scale=0.3),
        )

    inputs = [draw(10 * i) for i in range(bench.sets(moved))]
    picked = sample(rows)

    def error() -> float:
        excerpt = on_cpu(Inputs(*(_rows(getattr(inputs[0], f), picked, rows) for f in Inputs.__slots__)))
        return row_error(prepare(name, inputs[0])()[picked].flatten(0, 2), expected(excerpt).flatten(0, 2))

    return Problem(moved, [prepare(name, own) for own in inputs], error)


def expected(own: Inputs) -> Tensor:
    """Run the rule one token at a time, in float32."""
    q, k = (l2_normalise(x, 1.0) for x in own.repeated())
    g, beta = own.gates()
    state_BHKW, out = own.state_BHKW, []
    for t in range(q.shape[1]):
        state_BHKW = g[:, t, :, None, None].exp() * state_BHKW
        told_BHW = torch.einsum("bhkw,bhk->bhw", state_BHKW, k[:, t])
        u_BHW = beta[:, t, :, None] * (own.v_BTHW[:, t] - told_BHW)
        state_BHKW = state_BHKW + k[:, t, :, :, None] * u_BHW[:, :, None]
        out.append(torch.einsum("bhkw,bhk->bhw", state_BHKW, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)


def _rows(x: Tensor, picked: list[int], rows: int) -> Tensor:
    return x[picked] if x.dim() > 1 and len(x) == rows else x
