"""Random block heads in their published layouts, and a plain torch reference of one pass.

Written from the description of DFlash, without the package's code.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MASK = 61


def block_config(layers: int, **changes: Any) -> dict[str, Any]:
    """Return a config as z-lab writes it, for a target of 32 by 64 with this many layers."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": 64,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": layers,
        "block_size": 5,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 0]},
    }
    return config | changes


def streams_of(config: Mapping[str, Any]) -> list[int]:
    """Return the target's layers whose inputs the head reads."""
    if "aux_hidden_state_layer_ids" in config:
        return list(config["aux_hidden_state_layer_ids"])
    return [i + 1 for i in config.get("dflash_config", config)["target_layer_ids"]]


def block_tensors(config: Mapping[str, Any], *, seed: int, target_width: int = 32) -> dict[str, Tensor]:
    """Draw the tensors of a head with this config."""
    generator = torch.Generator().manual_seed(seed)
    width, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (dim * config[f"num_{name}_heads"] for name in ("attention", "key_value"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2 + (len(shape) == 1)

    tensors = {
        "fc.weight": draw(width, len(streams_of(config)) * target_width),
        "hidden_norm.weight": draw(width),
        "norm.weight": draw(width),
    }
    for i in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (ffn, width),
            "mlp.up_proj": (ffn, width),
            "mlp.down_proj": (width, ffn),
        }
        tensors |= {f"layers.{i}.{name}.weight": draw(*shape) for name, shape in own.items()}
        if config["attention_bias"]:
            biased = {"q": queries, "k": keys, "v": keys, "o": width}
            tensors |= {f"layers.{i}.self_attn.{n}_proj.bias": draw(size) for n, size in biased.items()}
    ranked = config.get("draft_vocab_size", config["vocab_size"])
    if rank := config.get("markov_rank"):
        tensors |= {
            "markov_head.markov_w1.weight": 5 * draw(config["vocab_size"], rank),
            "markov_head.markov_w2.weight": 5 * draw(ranked, rank),
            "confidence_head.proj.weight": draw(1, width + rank),
            "confidence_head.proj.bias": draw(1),
        }
    if "draft_vocab_size" in config:
        ids_C = torch.randperm(config["vocab_size"], generator=generator)[:ranked].sort().values
        tensors |= {
            "embed_tokens.weight": draw(config["vocab_size"], width),
            "lm_head.weight": draw(ranked, width),
            "d2t": ids_C - torch.arange(ranked),
            "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids_C, True),
        }
    return tensors


def write_block(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1), "utf-8")
    held = {name: value.contiguous() for name, value in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


class BlockOracle:
    """One pass over a block; the context's keys and values are computed anew from all positions.

    `embed_VD` and `head_VD` are the target's, used if the head has none.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], embed_VD: Tensor, head_VD: Tensor
    ) -> None:
        self.config, self.vocab = config, len(embed_VD)
        self.own = {n: v.to(embed_VD.dtype) if v.is_floating_point() else v for n, v in tensors.items()}
        self.embed_VD = self.own.get("embed_tokens.weight", embed_VD)
        self.head_VD = self.own.get("lm_head.weight", head_VD)
        nested = config.get("dflash_config", {})
        self.block = nested.get("block_size", config.get("block_size"))
        self.mask = nested.get("mask_token_id", config.get("mask_token_id"))

    def logits(self, streams: Sequence[Tensor], root: int, *, first: int = 0) -> Tensor:
        """Return logits of the next positions, from the target's streams before the root.

        The block sees the context from position `first` on.
        """
        self.first = first
        context = self._rms(torch.cat(list(streams), -1) @ self.own["fc.weight"].T, "hidden_norm")
        x = self.embed_VD[torch.tensor([root, *[self.mask] * (self.block - 1)])]
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attend(context, self._rms(x, f"layers.{layer}.input_layernorm"), layer)
            y = self._rms(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = (self._linear(y, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(torch.nn.functional.silu(gate) * up, f"layers.{layer}.mlp.down_proj")
        x = self._rms(x, "norm")[0 if self.config.get("sample_from_anchor") else 1 :]
        return self._spread(x @ self.head_VD.T)

    def bias(self, token: int) -> Tensor:
        """Return what is added to the logits after a token."""
        if "markov_head.markov_w1.weight" not in self.own:
            return self.embed_VD.new_zeros(self.vocab)
        own_C = self.own["markov_head.markov_w2.weight"] @ self.own["markov_head.markov_w1.weight"][token]
        return self._spread(own_C[None])[0]

    def _spread(self, own_TC: Tensor) -> Tensor:
        logits_TV = own_TC.new_full((len(own_TC), self.vocab), -torch.inf)
        offset_C = self.own.get("d2t", torch.zeros(own_TC.shape[1], dtype=torch.int64))
        for draft, offset in enumerate(offset_C.tolist()):
            logits_TV[:, draft + offset] = own_TC[:, draft]
        return logits_TV

    def _attend(self, context: Tensor, y: Tensor, layer: int) -> Tensor:
        heads, keys = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        name, seen = f"layers.{layer}.self_attn", len(context)
        both = torch.cat([context, y])

        def split(x: Tensor, part: str) -> Tensor:
            return self._linear(x, f"{name}.{part}_proj").view(len(x), -1, self.config["head_dim"])

        q, k, v = split(y, "q"), split(both, "k"), split(both, "v")
        q, k = self._rms(q, f"{name}.q_norm"), self._rms(k, f"{name}.k_norm")
        q, k = self._rotate(q, range(seen, seen + len(y))), self._rotate(k, range(len(both)))
        k, v = (x.repeat_interleave(heads // keys, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.config["head_dim"] ** -0.5
        hidden = [
            [j < self.first or not self._sees(layer, seen + i, j) for j in range(len(both))]
            for i in range(len(y))
        ]
        weights = scores.masked_fill(torch.tensor(hidden), -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(y), -1)
        return self._linear(out, f"{name}.o_proj")

    def _sees(self, layer: int, i: int, j: int) -> bool:
        slides = self.config.get("layer_types", ["full_attention"] * 9)[layer] == "sliding_attention"
        causal = self.config.get("is_causal", self.config.get("dflash_config", {}).get("causal", slides))
        return (not causal or j <= i) and (not slides or i - j < self.config["sliding_window"])

    def _rotate(self, x: Tensor, positions: range) -> Tensor:
        dim, half = x.shape[-1], x.shape[-1] // 2
        rate = self.config["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) * 2 / dim)
        angle = torch.outer(torch.tensor(positions, dtype=torch.float64), rate)
        cos, sin = (torch.cat([y, y], -1)[:, None].to(x.dtype) for y in (angle.cos(), angle.sin()))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.own[f"{name}.weight"].T + self.own.get(f"{name}.bias", 0)

    def _rms(self, x: Tensor, name: str) -> Tensor:
        weight = self.own.get(f"{name}.weight")
        if weight is None:  # heads of Llama's kind have no query and key norms
            return x
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight
