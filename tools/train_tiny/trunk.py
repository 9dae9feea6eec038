"""The trained network: Qwen3.5's layers as modules with the checkpoint's parameter names."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_tiny.delta_net import gated_delta_rule


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, under the names of Hugging Face's config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def is_attention(self, layer: int) -> bool:
        """Return whether a layer is attention; the others are recurrent."""
        return (layer + 1) % self.full_attention_interval == 0


Rope = tuple[Tensor, Tensor]


def rope_table(positions: int, dim: int, theta: float, device: torch.device) -> Rope:
    """Return the cosines and sines of positions from 0."""
    rate = theta ** -(torch.arange(0, dim, 2, device=device).float() / dim)
    angle = torch.arange(positions, device=device).float()[:, None] * rate
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x_BHTK: Tensor, rope: Rope) -> Tensor:
    """Rotate the first entries of each head by the position's angles."""
    cos, sin = rope
    dim = cos.shape[-1]
    turned = x_BHTK[..., :dim].float()
    swapped = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
    return torch.cat(((turned * cos + swapped * sin).to(x_BHTK.dtype), x_BHTK[..., dim:]), -1)


class RMSNorm(nn.Module):
    """Normalise in float32 and multiply by `offset + weight`."""

    def __init__(self, dim: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * (self.offset + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """Normalise each head, then gate it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * scaled * F.silu(gate.float())).to(gate.dtype)


def matrix(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Attention with per-head norms; `gated` by half of a wider query projection, as in Qwen3.5."""

    def __init__(self, shape: Shape, *, inputs: int | None = None, gated: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.gated = gated
        inputs = inputs or shape.hidden_size
        self.q_proj = matrix(inputs, self.heads * self.head_dim * (1 + gated))
        self.k_proj = matrix(inputs, self.kv_heads * self.head_dim)
        self.v_proj = matrix(inputs, self.kv_heads * self.head_dim)
        self.o_proj = matrix(self.heads * self.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps) if gated else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps) if gated else nn.Identity()

    def split(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values [B, H, T, K], keys repeated for every query head, and the gate."""
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, self.heads, -1)
        gate = None
        if self.gated:
            q, gate = q.chunk(2, -1)
            gate = gate.reshape(B, T, -1)
        k = self.k_proj(x_BTD).view(B, T, self.kv_heads, -1)
        v = self.v_proj(x_BTD).view(B, T, self.kv_heads, -1)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)
        k = rotate(self.k_norm(k).transpose(1, 2), rope)
        shared = self.heads // self.kv_heads
        return q, k.repeat_interleave(shared, 1), v.transpose(1, 2).repeat_interleave(shared, 1), gate

    def join(self, out_BHTK: Tensor, gate: Tensor | None) -> Tensor:
        """Apply the gate to the heads' outputs and project them."""
        out = out_BHTK.transpose(1, 2).flatten(2)
        projected: Tensor = self.o_proj(out if gate is None else out * gate.sigmoid())
        return projected

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        q, k, v, gate = self.split(x_BTD, rope)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape, *, chunk: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.chunk, self.dtype = chunk, dtype
        self.key_heads, self.value_heads = shape.linear_num_key_heads, shape.linear_num_value_heads
        self.keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        self.values = shape.linear_num_value_heads * shape.linear_value_head_dim
        channels = 2 * self.keys + self.values
        taps = shape.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.norm = GatedNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.in_proj_qkv = matrix(shape.hidden_size, channels)
        self.in_proj_z = matrix(shape.hidden_size, self.values)
        self.in_proj_b = matrix(shape.hidden_size, self.value_heads)
        self.in_proj_a = matrix(shape.hidden_size, self.value_heads)
        self.out_proj = matrix(self.values, shape.hidden_size)

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        B, T, _ = x_BTD.shape
        inputs = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        joined = F.linear(x_BTD, torch.cat([projection.weight for projection in inputs]))
        qkv, z, b, a = torch.split(joined, [projection.out_features for projection in inputs], -1)
        qkv = F.silu(self._convolve(qkv.float()))
        q, k, v = torch.split(qkv, [self.keys, self.keys, self.values], -1)
        q, k = (x.view(B, T, self.key_heads, -1).transpose(1, 2) for x in (q, k))
        v = v.view(B, T, self.value_heads, -1).transpose(1, 2)
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        shared = self.value_heads // self.key_heads
        q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
        beta = b.float().sigmoid().transpose(1, 2)
        g = (-self.A_log.exp() * F.softplus(a.float() + self.dt_bias)).transpose(1, 2)
        with torch.autocast(x_BTD.device.type, enabled=False):
            out = gated_delta_rule(q, k, v, g, beta, chunk=self.chunk, dtype=self.dtype)
        out = self.norm(out.transpose(1, 2), z.view(B, T, self.value_heads, -1))
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected

    def _convolve(self, x_BTC: Tensor) -> Tensor:
        """Compute the depthwise convolution by shifted copies, which avoids the library's overhead."""
        weight_CK = self.conv1d.weight.squeeze(1)
        taps, length = weight_CK.shape[1], x_BTC.shape[1]
        padded = F.pad(x_BTC, (0, 0, taps - 1, 0))
        shifted = [padded[:, i : i + length] * weight_CK[:, i] for i in range(taps)]
        return torch.stack(shifted).sum(0)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = matrix(hidden, width), matrix(hidden, width)
        self.down_proj = matrix(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    self_attn: Attention
    linear_attn: GatedDeltaNet

    def __init__(
        self, shape: Shape, *, attends: bool, chunk: int = 32, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape, chunk=chunk, dtype=dtype)
        self.attends = attends
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: Rope) -> Tensor:
        mixer = self.self_attn if self.attends else self.linear_attn
        x_BTD = x_BTD + mixer(self.input_layernorm(x_BTD), rope)
        x_BTD = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD


class Trunk(nn.Module):
    """The target model, with tied embeddings."""

    def __init__(self, shape: Shape, *, chunk: int = 32, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, attends=shape.is_attention(i), chunk=chunk, dtype=dtype)
            for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        begin(self, depth=shape.num_hidden_layers)

    def rope(self, positions: int) -> Rope:
        dim = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        return rope_table(positions, dim, self.shape.rope_theta, self.embed_tokens.weight.device)

    def forward(self, ids_BT: Tensor, aux_hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states after the final norm, and the residual streams that enter some layers.

        A tap after the last layer gets its output before the norm.
        """
        x_BTD, rope = self.embed_tokens(ids_BT), self.rope(ids_BT.shape[1])
        aux = {}
        for i, layer in enumerate(self.layers):
            if i in aux_hidden_layers:
                aux[i] = x_BTD
            x_BTD = layer(x_BTD, rope)
        aux[len(self.layers)] = x_BTD
        return self.norm(x_BTD), [aux[layer] for layer in aux_hidden_layers]

    def compile_layers(self) -> None:
        """Compile layer by layer: layers of one type share code, texts of one length one shape."""
        for layer in self.layers:
            layer.compile(dynamic=False)


@torch.no_grad()
def begin(module: nn.Module, *, depth: int) -> None:
    """Draw initial weights; branches into the residual stream start small."""
    for name, weight in module.named_parameters():
        if "embed" in name:
            weight.normal_(0, 0.02)
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.normal_(0, 0.6 * weight.shape[1] ** -0.5 / math.sqrt(2 * depth))
        elif weight.ndim == 2:
            weight.normal_(0, 0.6 * weight.shape[1] ** -0.5)
        elif name.endswith("conv1d.weight"):
            weight.normal_(0, 0.1)
            weight[..., -1] += 0.8
        elif name.endswith("A_log"):
            weight.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(weight).uniform_(math.log(0.001), math.log(0.1)))
            weight.copy_(step + torch.log(-torch.expm1(-step)))
