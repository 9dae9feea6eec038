"""Small random models of every family whose multi-token and EAGLE-3 heads partly agree with them.

The output matrices of all layers are small, so the next token depends mostly on the last one, and target and
heads map it alike. The layers' contributions, and some noise in the heads, make them disagree at times.
"""

import string
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from specdec.bench.random_eagle import eagle_config, eagle_tensors, write_eagle
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import read_network
from tests.models.block_heads import block_config, block_tensors, write_block
from tests.models.drawn import DRAWN
from tests.models.random_checkpoints import HEADS, Sample, add_tensors, head_tensors

VOCAB, HIDDEN, MAX_LENGTH = 64, 32, 256
END = VOCAB - 1
LAYERS = ("linear_attention", "linear_attention", "full_attention")
OUTPUTS = (
    *("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"),
    *("post_operator_norm.weight", "post_ffn_norm.weight"),
)

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}
_DELTA_NETS: Mapping[str, Any] = {
    **_COMMON,
    "num_hidden_layers": len(LAYERS),
    "layer_types": list(LAYERS),
    "intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mtp_num_hidden_layers": 1,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def _nemotron_h() -> PreTrainedConfig:
    return transformers.NemotronHConfig(
        **_COMMON,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        intermediate_size=24,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
        num_nextn_predict_layers=1,
        mtp_layers_block_type=["full_attention", "mlp"],
    )


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, num_hidden_layers=2, intermediate_size=24),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**_DELTA_NETS, **_EXPERTS),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_DELTA_NETS),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_DELTA_NETS, **_EXPERTS),
    "nemotron_h": _nemotron_h,
    **{family: partial(own.agreeing, _COMMON) for family, own in DRAWN.items()},
}
RECIPES: Mapping[str, tuple[float, int]] = {
    "qwen3": (0.3, 1),
    "qwen3_next": (0.3, 5),
    "qwen3_5": (0.45, 4),
    "qwen3_5_moe": (0.3, 5),
    "nemotron_h": (0.2, 4),
    **dict.fromkeys(DRAWN, (0.3, 4)),
    "lfm3": (0.12, 4),  # scale of the norms, which alone sets a layer's contribution
}
"""Scale of the layers' outputs, and the seed: chosen so that at each of four depths 30 to 80 % of a greedy
chain's tokens are accepted.
"""
NOISE = 0.05
"""Scale of the noise in a head's weights."""


def write_agreeing(folder: Path, family: str, *, vocab: int = VOCAB) -> None:
    """Write a model of this family with such a head, and a tokenizer of single characters."""
    config, (strength, seed) = CONFIGS[family](), RECIPES[family]
    config.vocab_size, config.eos_token_id = vocab, vocab - 1
    sample = Sample(family, seed, config, family in HEADS, fused=True, sharded=False, multimodal=False)
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
        if config.tie_word_embeddings:  # the head is stored anyway, and is used
            model.lm_head.weight = torch.nn.Parameter(torch.empty(vocab, HIDDEN))
        with torch.no_grad():
            own = dict(model.named_parameters())
            next(x for name, x in own.items() if "embed" in name).normal_()
            own["lm_head.weight"].normal_(std=0.5)
            _weaken(own, strength)
        model.save_pretrained(folder, save_original_format=False)
        if sample.mtp:
            head = head_tensors(sample)
            _weaken(head, strength)
            for name, value in head.items():
                if name.endswith(("fc.weight", "eh_proj.weight")):
                    head[name] = torch.eye(HIDDEN, 2 * HIDDEN) + NOISE * torch.randn(value.shape)
                elif "norm" in name:
                    head[name] = torch.full_like(value, float(family == "nemotron_h"))
            add_tensors(folder, head)
        _add_eagle(folder, own["lm_head.weight"].detach())
        _add_block(folder)
    _characters(vocab).save_pretrained(folder)


def _add_eagle(folder: Path, head_VD: Tensor) -> None:
    """Write an EAGLE-3 head whose attention finds the token itself, and copies its embedding.

    It has its own attention heads, and a vocabulary that lacks every fourth token.
    """
    network = read_network(Checkpoint(folder))
    ids_C = torch.tensor([token for token in range(network.vocab) if token % 4 != 1])
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": HIDDEN // 4}
    config = eagle_config(network, "eagle3", **heads, draft_vocab_size=len(ids_C))
    tensors = eagle_tensors(config, network, seed=0, spread=NOISE / 2)
    copies, layer = torch.eye(HIDDEN, 2 * HIDDEN), "midlayer.self_attn"
    for name, strength in (("q", 2.0), ("k", 2.0), ("v", 1.0)):
        tensors[f"{layer}.{name}_proj.weight"] += strength * copies
    tensors[f"{layer}.o_proj.weight"] += torch.eye(HIDDEN)
    tensors |= {"lm_head.weight": head_VD[ids_C], "d2t": ids_C - torch.arange(len(ids_C))}
    tensors["t2d"] = torch.zeros(len(head_VD), dtype=torch.bool).index_fill(0, ids_C, True)
    write_eagle(folder / "eagle3", config, tensors)


def _add_block(folder: Path) -> None:
    """Write a block head in which each position finds the one before and copies its embedding.

    So the first draft token mostly agrees with the target, and deeper ones seldom.
    """
    network = read_network(Checkpoint(folder))
    config = block_config(
        len(network.layers),
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=HIDDEN // 4,
        rope_theta=2.0,
        vocab_size=network.vocab,
        attention_bias=True,
        block_size=6,
        dflash_config={"mask_token_id": network.vocab - 3, "target_layer_ids": [0]},
    )
    tensors = {
        name: value * 0.1 if value.ndim > 1 else value
        for name, value in block_tensors(config, seed=0).items()
    }
    layer, pairs = "layers.0.self_attn", HIDDEN // 8
    angle = 2.0 ** -(torch.arange(pairs) / pairs)
    ahead = torch.cat([angle.cos() - angle.sin(), angle.cos() + angle.sin()])
    tensors[f"{layer}.q_proj.bias"] = torch.full((HIDDEN,), 9.0)
    tensors[f"{layer}.k_proj.bias"] = 9.0 * ahead.repeat(4)
    tensors[f"{layer}.v_proj.weight"] += torch.eye(HIDDEN)
    tensors[f"{layer}.o_proj.weight"] += 4.0 * torch.eye(HIDDEN)
    tensors |= {f"{layer}.{name}.bias": torch.zeros(HIDDEN) for name in ("v_proj", "o_proj")}
    tensors |= {f"{layer}.{name}.weight": torch.full((2 * pairs,), 3.0) for name in ("q_norm", "k_norm")}
    write_block(folder / "dflash", config, tensors)


def _weaken(tensors: Mapping[str, Tensor], strength: float) -> None:
    for name, value in tensors.items():
        if name.endswith(OUTPUTS):
            value.mul_(strength)


def _characters(vocab: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer in which each token but the last is one letter, digit or full stop."""
    letters = [*string.ascii_letters, *string.digits, "."][: vocab - 1]
    bpe = models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
