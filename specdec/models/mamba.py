"""Mamba and Falcon-Mamba: only mixers, with a float32 residual stream."""

from collections.abc import Mapping
from typing import Any

from specdec.models import mamba2, rules, spec
from specdec.models.blocks import MOST_LAYERS, assemble, model_type, refuse_unsupported, step_rank
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, layer_rules
from specdec.models.mixers import Mamba1
from specdec.models.norm import Norm

NAME = "mamba"
FALCON = "falcon_mamba"
MODEL_TYPES: tuple[str, ...] = (NAME, FALCON)
TITLES: Mapping[str, str] = {"mamba": "Mamba"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.absent("ssm_cfg", "a config as transformers writes it (convert the checkpoint)")
    norm = Norm(fields.number("layer_norm_epsilon", default=1e-5), wide=False)
    layer = spec.LayerSpec((_mixer(fields),), None)
    return assemble(
        *(NAME, fields, (layer,) * fields.integer("num_hidden_layers", most=MOST_LAYERS), norm),
        tied=True,
        max_length=mamba2.UNBOUNDED,
        wide_residual=fields.flag("residual_in_fp32", default=True),
    )


def _mixer(fields: Fields) -> Mamba1:
    """Read the mixer; Falcon's normalises the rank, B and C without weights."""
    fields.only("hidden_act", "silu")
    return Mamba1(
        inner=fields.integer(
            "intermediate_size", default=fields.integer("expand", default=2) * fields.integer("hidden_size")
        ),
        state_dim=fields.integer("state_size", default=16, least=2),
        rank=step_rank(fields, "time_step_rank"),
        conv=fields.integer("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        norms="bare" if model_type(fields) == FALCON else "",
        eps=fields.number("mixer_rms_eps", default=1e-6),
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout."""
    mixer = (
        *layer_rules(r"mixer\.(x|dt)\.weight", r"mixer.\2_proj.weight"),
        *layer_rules(r"mixer\.dt_bias", "mixer.dt_proj.bias"),
    )
    return CheckpointLayout(
        (*mixer, *mamba2.NAMES), mamba2.PREFIXES, "embeddings.weight", ignored=rules.always_ignored(network)
    )
