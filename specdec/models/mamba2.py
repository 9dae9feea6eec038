"""Mamba-2 and Codestral-Mamba: only mixers, with a float32 residual stream."""

from collections.abc import Mapping
from typing import Any

from specdec.models import rules, spec
from specdec.models.blocks import MOST_LAYERS, assemble, refuse_unsupported, step_limit
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, TensorRule, layer_rules, squeeze_conv
from specdec.models.mixers import Mamba2
from specdec.models.norm import Norm

NAME = "mamba2"
MODEL_TYPES: tuple[str, ...] = ("mamba2",)
TITLES: Mapping[str, str] = {"mamba2": "Mamba-2"}

UNBOUNDED = 1 << 20
"""Maximum positions: a state has no length limit, and the config names none."""


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.absent("ssm_cfg", "a config as transformers writes it (convert the checkpoint)")
    norm = Norm(fields.number("layer_norm_epsilon", default=1e-5), wide=False)
    layer = spec.LayerSpec((_mixer(fields, norm.eps),), None)
    return assemble(
        *(NAME, fields, (layer,) * fields.integer("num_hidden_layers", most=MOST_LAYERS), norm),
        max_length=UNBOUNDED,
        wide_residual=fields.flag("residual_in_fp32", default=True),
    )


def _mixer(fields: Fields, eps: float) -> Mamba2:
    fields.only("hidden_act", "silu")
    heads, groups = fields.integer("num_heads"), fields.integer("n_groups", default=8)
    if heads % groups:
        fields.refuse("num_heads", f"a multiple of n_groups ({groups})")
    head_dim, inner = (
        fields.integer("head_dim"),
        fields.integer("expand", default=2) * fields.integer("hidden_size"),
    )
    if heads * head_dim != inner:
        fields.refuse("num_heads", f"heads (of head_dim) that make up expand times hidden_size ({inner})")
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=fields.integer("state_size"),
        conv=fields.integer("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        eps=eps,
        step_limit=step_limit(fields),
    )


NAMES = (
    TensorRule(r"embed\.weight", "~embeddings.weight"),
    TensorRule(r"embed\.weight", "~embedding.weight"),
    TensorRule(r"norm\.weight", "~norm_f.weight"),
    TensorRule(r"head\.weight", "lm_head.weight"),
    *layer_rules(r"mixer_norm\.weight", "norm.weight"),
    *layer_rules(r"mixer\.(in|out)\.(weight|bias)", r"mixer.\2_proj.\3"),
    *layer_rules(r"mixer\.conv\.weight", "mixer.conv1d.weight", recipe=squeeze_conv),
    *layer_rules(r"mixer\.conv\.bias", "mixer.conv1d.bias"),
    *layer_rules(r"mixer\.(A_log|D|dt_bias|norm\.weight)", r"mixer.\2"),
)
PREFIXES = ("backbone.", "model.", "")


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    return CheckpointLayout(NAMES, PREFIXES, "embeddings.weight", ignored=rules.always_ignored(network))
