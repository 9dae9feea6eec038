"""The layers that work on each token alone: dense and mixture-of-experts."""

import torch
from torch import Tensor

from specdec.kernels.linear.fp8 import join
from specdec.kernels.table import Kernels
from specdec.models import spec
from specdec.models.weights import Weights


class MLP:
    def __init__(self, s: spec.MLP, hidden: int, weights: Weights, kernels: Kernels) -> None:
        self.kernels = kernels
        rows = ("gate", "up") if s.activation == "swiglu" else ("up",)
        weight = join([weights.matrix(f"{name}.weight", (s.width, hidden)) for name in rows])
        bias = torch.cat([weights.take(f"{name}.bias", (s.width,)) for name in rows]) if s.bias else None
        self.up = kernels.pack(weight, bias)
        self.activate = kernels.swiglu if s.activation == "swiglu" else kernels.relu2
        down_bias = weights.take("down.bias", (hidden,)) if s.bias else None
        self.down = kernels.pack(weights.matrix("down.weight", (hidden, s.width)), down_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.kernels.linear(self.activate(self.kernels.linear(x_TD, self.up)), self.down)


class MoE:
    def __init__(self, s: spec.MoE, hidden: int, weights: Weights, kernels: Kernels) -> None:
        self.spec, self.kernels = s, kernels
        gated = s.activation == "swiglu"
        router_dtype = torch.float32 if s.router == "sigmoid" else None
        router_ED = weights.take("router.weight", (s.experts, hidden), router_dtype)
        if s.shared_gate:
            # The shared expert's gate is one more row: one product makes both.
            router_ED = torch.cat([router_ED, weights.take("shared_gate.weight", (1, hidden))])
        self.router = kernels.pack(router_ED)
        self.correction_E = (
            weights.take("router.correction", (s.experts,), torch.float32) if s.router == "sigmoid" else None
        )
        inner = s.latent or hidden
        rows = s.width * (2 if gated else 1)
        self.up_EID = kernels.pack_experts(weights.matrix("experts.up", (s.experts, rows, inner)))
        self.down_EDI = kernels.pack_experts(weights.matrix("experts.down", (s.experts, inner, s.width)))
        if s.latent:
            self.latent_in = kernels.pack(weights.matrix("latent_in.weight", (s.latent, hidden)))
            self.latent_out = kernels.pack(weights.matrix("latent_out.weight", (hidden, s.latent)))
        self.shared = None
        if s.shared_width:
            shared = spec.MLP(s.shared_width, s.activation)
            self.shared = MLP(shared, hidden, weights.within("shared"), kernels)

    def _route(self, score_TE: Tensor) -> tuple[Tensor, Tensor]:
        s, ops = self.spec, self.kernels
        if self.correction_E is None:
            return ops.route_softmax(score_TE, s.top_k, renormalise=s.renormalise)
        return ops.route_sigmoid(
            score_TE,
            self.correction_E,
            s.top_k,
            groups=s.groups,
            top_groups=s.top_groups,
            renormalise=s.renormalise,
            scale=s.scale,
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        s, ops = self.spec, self.kernels
        routed_TD = x_TD if self.correction_E is None else x_TD.to(self.correction_E.dtype)
        score_TE, gate_T1 = ops.linear(routed_TD, self.router).tensor_split([s.experts], dim=1)
        index_TA, weight_TA = self._route(score_TE)
        inner_TD = ops.linear(x_TD, self.latent_in) if s.latent else x_TD
        gated = s.activation == "swiglu"
        y_TD = ops.experts(inner_TD, self.up_EID, self.down_EDI, index_TA, weight_TA, gated=gated)
        if s.latent:
            y_TD = ops.linear(y_TD, self.latent_out)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        return ops.add_gated(y_TD, shared_TD, gate_T1) if s.shared_gate else y_TD + shared_TD
