"""Draft heads as modules, and the recursion that they are trained in because they will be run in it.

At position p a head reads the target's hidden state there and token p+1; below, it reads what it wrote.
In a pass over a text every position is such a root at once: step j reads token p+j and attends to the
roots up to p, whose keys came from the target, and to its own chain: what an engine computes, in parallel.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_tiny.trunk import (
    MLP,
    Attention,
    Layer,
    RMSNorm,
    Rope,
    Shape,
    Trunk,
    begin,
    matrix,
    rope_table,
)

Keys = tuple[Tensor, Tensor]


def attend(q: Tensor, roots: Keys, chain: list[Keys]) -> Tensor:
    """Attend from every root's chain to the roots up to it and to the chain's own keys, all [B, H, T, K]."""
    scale, length = q.shape[-1] ** -0.5, q.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    above = (q @ roots[0].mT).float().masked_fill(~seen, float("-inf"))
    own = torch.stack([(q.float() * key.float()).sum(-1) for key, _ in chain], -1)
    share = (torch.cat([above, own], -1) * scale).softmax(-1)
    out = (share[..., :length].to(q.dtype) @ roots[1]).float()
    for i, (_, value) in enumerate(chain):
        out = out + share[..., length + i, None] * value.float()
    joined: Tensor = out.to(q.dtype)
    return joined


class Head(nn.Module, ABC):
    """What the two kinds share. They differ in what enters the layer, and in what is read and handed on."""

    aux_hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose residual stream is read before them; none: the final hidden state is."""

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """Return what attends in the one layer."""

    @abstractmethod
    def first(self, hidden_BTD: Tensor, aux: list[Tensor]) -> Tensor:
        """Return the state that the roots read."""

    @abstractmethod
    def enter(self, embed_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what attention reads."""

    @abstractmethod
    def leave(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return, after attention was added, the state for the next step and what the output matrix reads."""

    @abstractmethod
    def rope(self, positions: int) -> Rope:
        """Tabulate the rotation of positions from 0."""

    def layer(
        self, embed: Tensor, state: Tensor, rope: Rope, roots: Keys | None, chain: list[Keys]
    ) -> tuple[Tensor, Tensor, Keys]:
        """Run one step; return the next state, what is projected, and this step's keys and values."""
        x, read = self.enter(embed, state)
        q, k, v, gate = self.attention.split(read, rope)
        if roots is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend(q, roots, [*chain, (k, v)])
        state, projected = self.leave(x + self.attention.join(out, gate))
        return state, projected, (k, v)

    def unroll(self, state: Tensor, ids: Tensor, embed_VD: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield for j = 1, 2, … what predicts token p+j+1 of each root p [B, T]; `ids` has `steps` more."""
        length = state.shape[1]
        cos, sin = self.rope(length + steps)
        roots: Keys | None = None
        chain: list[Keys] = []
        for j in range(steps):
            embed = F.embedding(ids[:, j + 1 : j + 1 + length], embed_VD)
            rope = cos[j : j + length], sin[j : j + length]
            state, projected, keys = self.layer(embed, state, rope, roots, chain)
            if roots is None:
                roots = keys
            else:
                chain = [*chain, keys]
            yield projected

    def output(self, embed_VD: Tensor) -> Tensor:
        """Return the rows that what is projected is multiplied by."""
        return embed_VD

    def choose(self, logits_BTV: Tensor) -> Tensor:
        """Cut the target's distribution down to what this head can say."""
        return logits_BTV

    def name(self, chosen_BT: Tensor) -> Tensor:
        """Turn ids of what this head can say into the target's."""
        return chosen_BT

    @abstractmethod
    def begin(self, trunk: Trunk) -> None:
        """Take first weights from the target."""


class MTP(Head):
    """Qwen3.5's own head: a gated layer over cat[norm(embedding), norm(hidden)]; what recurs is normed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = matrix(2 * hidden, hidden)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([Layer(shape, attends=True)])
        self.norm = RMSNorm(hidden, eps)

    @torch.no_grad()
    def begin(self, trunk: Trunk) -> None:
        """Begin as the target's last layer, reading embedding and hidden state alike."""
        self.block.load_state_dict(trunk.layers[-1].state_dict())
        self.norm.load_state_dict(trunk.norm.state_dict())
        one = torch.eye(self.shape.hidden_size)
        self.fc.weight.copy_(torch.cat([one, one], 1) * 0.5)

    @property
    def block(self) -> Layer:
        """Return the one layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @property
    def attention(self) -> Attention:
        return self.block.self_attn

    def rope(self, positions: int) -> Rope:
        dim = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        return rope_table(positions, dim, self.shape.rope_theta, self.fc.weight.device)

    def first(self, hidden_BTD: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden_BTD

    def enter(self, embed_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, Tensor]:
        joined = [self.pre_fc_norm_embedding(embed_BTD), self.pre_fc_norm_hidden(state_BTD)]
        x = self.fc(torch.cat(joined, -1))
        return x, self.block.input_layernorm(x)

    def leave(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.block
        state = self.norm(x_BTD + layer.mlp(layer.post_attention_layernorm(x_BTD)))
        return state, state


class Midlayer(nn.Module):
    """EAGLE-3's decoder layer: attention reads embedding and state side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps, 0.0), RMSNorm(hidden, eps, 0.0)
        self.post_attention_layernorm = RMSNorm(hidden, eps, 0.0)
        self.self_attn = Attention(shape, inputs=2 * hidden, gated=False)
        self.mlp = MLP(hidden, shape.intermediate_size)


OWN_HEADS, FREE_HEADS = 3, 3
"""Heads of EAGLE's layer that begin by reading their own position, enough for an embedding, and others."""
OWN_SCORE = 12.0
"""By how much a head that begins so prefers its own position."""


class Eagle3(Head):
    """EAGLE-3's head: three residual streams of the target, its own vocabulary, a state before its norm.

    The last stream is what the target's last layer writes: what comes next is decided nowhere before.
    """

    def __init__(self, shape: Shape, vocabulary: Tensor) -> None:
        super().__init__()
        heads = OWN_HEADS + FREE_HEADS
        hidden, layers = shape.hidden_size, shape.num_hidden_layers
        self.shape = replace(
            shape, partial_rotary_factor=1.0, num_attention_heads=heads, num_key_value_heads=heads
        )
        self.aux_hidden_layers = (2, layers // 2, layers)
        self.fc = matrix(3 * hidden, hidden)
        self.midlayer = Midlayer(self.shape)
        self.norm = RMSNorm(hidden, shape.rms_norm_eps, 0.0)
        self.lm_head = matrix(hidden, len(vocabulary))
        self.vocabulary: Tensor
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        begin(self, depth=1)

    @torch.no_grad()
    def begin(self, trunk: Trunk) -> None:
        """Begin with the target's output rows, its last layer's feed-forward, and the embedding let through.

        In this layout a token reaches the residual stream by attention alone. Drawn at random, that reads all
        positions alike, and the head takes most of its training to find the one token that it was given.
        """
        device = trunk.embed_tokens.weight.device
        self.lm_head.weight.copy_(trunk.embed_tokens.weight[self.vocabulary])
        self.norm.weight.copy_(1 + trunk.norm.weight)
        last = trunk.layers[-1]
        assert isinstance(last, Layer)
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        self.midlayer.post_attention_layernorm.weight.copy_(1 + last.post_attention_layernorm.weight)
        hidden = self.shape.hidden_size
        _, aux = trunk(torch.arange(64, device=device)[None], self.aux_hidden_layers)
        # Rounded, for threads and compilers sum otherwise, and what was kept is known by what it began with.
        spread = float(f"{aux[-1].float().pow(2).mean().sqrt():.2g}")
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * hidden :] = 0.5 * torch.eye(hidden, device=device) / spread
        own, attention = OWN_HEADS * self.shape.head_dim, self.midlayer.self_attn
        keys = attention.k_proj.weight[:own]
        keys.normal_(0, (OWN_SCORE / (2 * hidden * self.shape.head_dim**0.5)) ** 0.5)
        attention.q_proj.weight[:own] = keys
        drawn = torch.randn(max(own, hidden), min(own, hidden), device=device)
        turned = torch.linalg.qr(drawn.double())[0].float()  # so precise that threads cannot be told from it
        turned = turned if own >= hidden else turned.mT
        attention.v_proj.weight[:own] = torch.cat([turned, torch.zeros_like(turned)], 1)
        attention.o_proj.weight[:, :own] = 0.5 * turned.mT

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def rope(self, positions: int) -> Rope:
        return rope_table(positions, self.shape.head_dim, self.shape.rope_theta, self.fc.weight.device)

    def first(self, hidden_BTD: Tensor, aux: list[Tensor]) -> Tensor:
        state: Tensor = self.fc(torch.cat(aux, -1))
        return state

    def enter(self, embed_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return state_BTD, torch.cat([layer.input_layernorm(embed_BTD), layer.hidden_norm(state_BTD)], -1)

    def leave(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        state = x_BTD + layer.mlp(layer.post_attention_layernorm(x_BTD))
        return state, self.norm(state)

    def output(self, embed_VD: Tensor) -> Tensor:
        return self.lm_head.weight

    def choose(self, logits_BTV: Tensor) -> Tensor:
        chosen: Tensor = logits_BTV[..., self.vocabulary]
        return chosen

    def name(self, chosen_BT: Tensor) -> Tensor:
        named: Tensor = self.vocabulary[chosen_BT]
        return named
