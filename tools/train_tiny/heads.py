"""Draft heads as modules, and the recursion for training, which matches inference.

At position p a head gets the target's hidden state there and token p+1; deeper steps get its own output. In
training every position is such a root: step j gets token p+j and attends to the roots up to p, whose keys
come from the target, and to its own chain. This computes in parallel what an engine does.
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
    """The common part of both heads. They differ in the layer's input, its output and the recurrent state."""

    aux_hidden_layers: tuple[int, ...] = ()
    """Target layers whose input residual streams the head uses; none: the final hidden state."""

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """Return the attention of the single layer."""

    @abstractmethod
    def first(self, hidden_BTD: Tensor, aux: list[Tensor]) -> Tensor:
        """Return the roots' input state."""

    @abstractmethod
    def enter(self, embed_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the attention's input."""

    @abstractmethod
    def leave(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return, from the stream after attention, the next step's state and the output matrix's input."""

    @abstractmethod
    def rope(self, positions: int) -> Rope:
        """Return the rotary table of positions from 0."""

    def layer(
        self, embed: Tensor, state: Tensor, rope: Rope, roots: Keys | None, chain: list[Keys]
    ) -> tuple[Tensor, Tensor, Keys]:
        """Run one step; return the next state, the output matrix's input, and this step's keys and values."""
        x, read = self.enter(embed, state)
        q, k, v, gate = self.attention.split(read, rope)
        if roots is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = attend(q, roots, [*chain, (k, v)])
        state, projected = self.leave(x + self.attention.join(out, gate))
        return state, projected, (k, v)

    def unroll(self, state: Tensor, ids: Tensor, embed_VD: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield for j = 1, 2, … the predictor of token p+j+1 per root p [B, T]; `ids` has `steps` more."""
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
        """Return the output matrix."""
        return embed_VD

    def choose(self, logits_BTV: Tensor) -> Tensor:
        """Restrict the target's distribution to the head's vocabulary."""
        return logits_BTV

    def name(self, chosen_BT: Tensor) -> Tensor:
        """Map ids of the head's vocabulary to the target's."""
        return chosen_BT

    @abstractmethod
    def begin(self, trunk: Trunk) -> None:
        """Initialise weights from the target."""


class MTP(Head):
    """Qwen3.5's MTP head: a gated layer over cat[norm(embedding), norm(hidden)]; its state is normed."""

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
        """Initialise as the target's last layer, weighting embedding and hidden state equally."""
        self.block.load_state_dict(trunk.layers[-1].state_dict())
        self.norm.load_state_dict(trunk.norm.state_dict())
        one = torch.eye(self.shape.hidden_size)
        self.fc.weight.copy_(torch.cat([one, one], 1) * 0.5)

    @property
    def block(self) -> Layer:
        """Return the single layer."""
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
    """EAGLE-3's decoder layer: attention over embedding and state concatenated."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps, 0.0), RMSNorm(hidden, eps, 0.0)
        self.post_attention_layernorm = RMSNorm(hidden, eps, 0.0)
        self.self_attn = Attention(shape, inputs=2 * hidden, gated=False)
        self.mlp = MLP(hidden, shape.intermediate_size)


OWN_HEADS, FREE_HEADS = 3, 3
"""Heads initialised to attend to their own position, enough for an embedding, and the others."""
OWN_SCORE = 12.0
"""Score margin of such a head for its own position."""


class Eagle3(Head):
    """EAGLE-3's head: three residual streams of the target, its own vocabulary, a state before its norm.

    The last stream is the output of the target's last layer: earlier layers have not decided the next token.
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
        """Initialise the output rows and feed-forward from the target, and pass the embedding through.

        In this layout a token reaches the residual stream only by attention. With random weights that
        averages all positions, and the head spends most of its training learning to attend to its own input
        token.
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
        # Rounded, as threads and compilers sum in different orders, and saved stages are matched by initial
        # weights.
        spread = float(f"{aux[-1].float().pow(2).mean().sqrt():.2g}")
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * hidden :] = 0.5 * torch.eye(hidden, device=device) / spread
        own, attention = OWN_HEADS * self.shape.head_dim, self.midlayer.self_attn
        keys = attention.k_proj.weight[:own]
        keys.normal_(0, (OWN_SCORE / (2 * hidden * self.shape.head_dim**0.5)) ** 0.5)
        attention.q_proj.weight[:own] = keys
        drawn = torch.randn(max(own, hidden), min(own, hidden), device=device)
        turned = torch.linalg.qr(drawn.double())[0].float()  # in float64, whatever the thread count
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
