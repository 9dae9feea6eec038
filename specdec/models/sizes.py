"""Map tensor sizes to config.json fields, so that an error can name the relevant ones."""

import re
from collections.abc import Mapping
from typing import Any

from specdec.models.fields import TEXT
from specdec.models.layouts import Shape

_HIDDEN = "hidden_size"
_QUERY, _KEY = "num_attention_heads head_dim", "num_key_value_heads head_dim"
_DELTA_KEY = "linear_num_key_heads linear_key_head_dim"
_DELTA_VALUE = "linear_num_value_heads linear_value_head_dim"
_MAMBA = "mamba_num_heads mamba_head_dim"
_MAMBA_IN = f"{_MAMBA} n_groups mamba_n_groups ssm_state_size"
_EXPERTS, _EXPERT = "num_experts n_routed_experts", "moe_intermediate_size"
_SHARED = "shared_expert_intermediate_size moe_shared_expert_intermediate_size"

_AXES: tuple[tuple[str, ...], ...] = (
    (r"embed\.weight", "vocab_size", _HIDDEN),
    (r"head\.weight", "draft_vocab_size vocab_size", _HIDDEN),
    (r"fc\.weight", _HIDDEN, f"{_HIDDEN} target_hidden_size"),
    (r"mixer\.q\.(weight|bias)", _QUERY, _HIDDEN),
    (r"mixer\.[kv]\.(weight|bias)", _KEY, _HIDDEN),
    (r"mixer\.o\.weight", _HIDDEN, _QUERY),
    (r"mixer\.[qk]_norm\.weight", "head_dim"),
    (r"mixer\.in_(qkv|z)\.weight", f"{_DELTA_KEY} {_DELTA_VALUE}", _HIDDEN),
    (r"mixer\.in_[ba]\.weight", "linear_num_value_heads", _HIDDEN),
    (r"mixer\.in\.(weight|bias)", _MAMBA_IN, _HIDDEN),
    (
        r"mixer\.conv\.(weight|bias)",
        f"{_DELTA_KEY} {_DELTA_VALUE} {_MAMBA_IN}",
        "linear_conv_kernel_dim conv_kernel mamba_d_conv",
    ),
    (r"mixer\.(A_log|D|dt_bias)", "linear_num_value_heads mamba_num_heads"),
    (r"mixer\.norm\.weight", f"linear_value_head_dim {_MAMBA}"),
    (r"mixer\.out\.weight", _HIDDEN, f"{_DELTA_VALUE} {_MAMBA}"),
    (r"ffn\.router\.\w+", _EXPERTS, _HIDDEN),
    (r"ffn\.experts\.up", _EXPERTS, _EXPERT, f"{_HIDDEN} moe_latent_size"),
    (r"ffn\.experts\.down", _EXPERTS, f"{_HIDDEN} moe_latent_size", _EXPERT),
    (r"shared\.(gate|up)\.weight", _SHARED, _HIDDEN),
    (r"shared\.down\.weight", _HIDDEN, _SHARED),
    (r"shared_gate\.weight", "", _HIDDEN),
    (r"latent_in\.weight", "moe_latent_size", _HIDDEN),
    (r"latent_out\.weight", _HIDDEN, "moe_latent_size"),
    (r"ffn\.(gate|up)\.(weight|bias)", "intermediate_size", _HIDDEN),
    (r"ffn\.down\.weight", _HIDDEN, "intermediate_size"),
    (r"(_norm|norm)\.weight|fc\.bias|(o|out|down)\.bias", _HIDDEN),
)
"""By our names: the fields of each axis, in every family's spelling."""


def fields_behind(config: Mapping[str, Any], ours: str, found: Shape, expected: Shape) -> tuple[str, ...]:
    """Return the config fields behind a mismatch between a file's tensor and our shape.

    If the number of axes differs, fields of all axes are returned.
    """
    axes = next((rest for name, *rest in _AXES if re.search(rf"({name})$", ours)), [])
    if len(axes) == len(found) == len(expected):
        sizes = zip(axes, found, expected, strict=True)
        axes = [axis for axis, found_size, other in sizes if found_size != other]
    text_config = next((config[name] for name in TEXT if isinstance(config.get(name), Mapping)), config)
    return tuple(dict.fromkeys(field for axis in axes for field in axis.split() if field in text_config))
