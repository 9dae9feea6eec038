"""EAGLE heads in plain torch, one full forward per text, from the description of their published layouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """Run a head over a text. `embed_VD` and `head_VD` are the target's, used if the head has none."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embed_VD: Tensor, head_VD: Tensor
    ) -> None:
        self.config, dtype = config, embed_VD.dtype
        plain = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): value
            for name, value in tensors.items()
        }
        self.own = {n: v.to(dtype) if v.is_floating_point() else v for n, v in plain.items()}
        self.embed_VD = self.own.get("embed_tokens.weight", embed_VD)
        self.head_VD = self.own.get("lm_head.weight", head_VD)
        self.vocab = len(embed_VD)
        self.fuses = "layers.0.hidden_norm.weight" in plain

    def fuse(self, given: Sequence[Tensor]) -> Tensor:
        """Combine the target's hidden states into one: its last, or three of its residual streams."""
        if not self.fuses:
            return given[-1]
        if self.config.get("fc_norm"):
            given = [self._rms(x, self.own[f"fc_norm.{i}.weight"]) for i, x in enumerate(given)]
        x = torch.cat(list(given), -1)
        if self.config.get("norm_before_fc"):
            x = self._rms(x, self.own["input_norm.weight"])
        return x @ self.own["fc.weight"].T

    def run(self, tokens: Sequence[int], hidden_TD: Tensor, seen: Sequence[int] = ()) -> Tensor:
        """Return the last layer's output at each position, from its hidden state and the next token.

        `seen` holds the first position that each one attends to; by default the start of the text.
        """
        x, read = self.embed_VD[torch.tensor(tokens)], hidden_TD
        if self.fuses:
            read = self._norm(hidden_TD, "hidden_norm")
            x = read if self.config.get("norm_before_residual") else hidden_TD
            read = torch.cat([self._norm(self.embed_VD[torch.tensor(tokens)], "input_layernorm"), read], -1)
        else:
            x = torch.cat([x, hidden_TD], -1) @ self.own["fc.weight"].T + self.own.get("fc.bias", 0)
            read = x
        for layer in range(self.config["num_hidden_layers"]):
            if layer:
                read = self._norm(x, "input_layernorm", layer)
            x = x + self._attend(read, seen or [0] * len(read), layer)
            y = self._norm(x, "post_attention_layernorm", layer)
            gate, up = (self._linear(y, f"mlp.{name}_proj", layer) for name in ("gate", "up"))
            x = x + self._linear(torch.nn.functional.silu(gate) * up, "mlp.down_proj", layer)
        return self._rms(x, self.own["norm.weight"]) if self.config.get("norm_output") else x

    def logits(self, out_TD: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        if self.fuses and not self.config.get("norm_output"):
            out_TD = self._rms(out_TD, self.own["norm.weight"])
        own_TC = out_TD @ self.head_VD.T
        logits_TV = own_TC.new_full((len(own_TC), self.vocab), -torch.inf)
        offset_C = self.own.get("d2t", torch.zeros(own_TC.shape[1], dtype=torch.int64))
        for draft, offset in enumerate(offset_C.tolist()):
            logits_TV[:, draft + offset] = own_TC[:, draft]
        return logits_TV

    def _attend(self, x: Tensor, seen: Sequence[int], layer: int) -> Tensor:
        heads, keys = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, count = self.config["head_dim"], len(x)
        qkv = (self._linear(x, f"self_attn.{n}_proj", layer) for n in "qkv")
        q, k, v = (own.view(count, -1, dim).transpose(0, 1) for own in qkv)
        q, k = self._rotate(q), self._rotate(k)
        k, v = (y.repeat_interleave(heads // keys, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) * dim**-0.5
        hidden = [[not seen[i] <= j <= i for j in range(count)] for i in range(count)]
        scores = scores.masked_fill(torch.tensor(hidden), -torch.inf)
        out = scores.softmax(-1) @ v
        return self._linear(out.transpose(0, 1).reshape(count, -1), "self_attn.o_proj", layer)

    def _rotate(self, x: Tensor) -> Tensor:
        dim, half = x.shape[-1], x.shape[-1] // 2
        power = torch.arange(half, dtype=torch.float64) * 2 / dim
        rate = self.config["rope_theta"] ** -power
        if scaling := self.config.get("rope_scaling"):
            low, turns = scaling["low_freq_factor"], rate * scaling["original_max_position_embeddings"]
            blend = (turns / (2 * torch.pi) - low) / (scaling["high_freq_factor"] - low)
            blend = blend.clamp(0, 1)
            rate = rate * (blend + (1 - blend) / scaling["factor"])
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), rate)
        cos, sin = (torch.cat([y, y], -1).to(x.dtype) for y in (angle.cos(), angle.sin()))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _linear(self, x: Tensor, name: str, layer: int) -> Tensor:
        y = x @ self.own[f"layers.{layer}.{name}.weight"].T
        return y + self.own.get(f"layers.{layer}.{name}.bias", 0)

    def _norm(self, x: Tensor, name: str, layer: int = 0) -> Tensor:
        return self._rms(x, self.own[f"layers.{layer}.{name}.weight"])

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight
