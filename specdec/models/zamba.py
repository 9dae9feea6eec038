"""Zamba: Mamba-1 in heads; some layers first run one shared attention block."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.models import rules, spec, zamba2
from specdec.models.blocks import MOST_LAYERS, assemble, refuse_unsupported, step_rank
from specdec.models.feed_forward import MLP
from specdec.models.fields import Fields
from specdec.models.layouts import CheckpointLayout, Shape, layer_rules, rows, rows_by_kind, stored_as
from specdec.models.mixers import Mamba1, SharedBlock
from specdec.models.norm import Norm

NAME = "zamba"
MODEL_TYPES: tuple[str, ...] = ("zamba",)
TITLES: Mapping[str, str] = {"zamba": "Zamba"}


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a config."""
    fields = Fields(config)
    refuse_unsupported(fields)
    fields.only("hidden_act", "gelu")
    norm = Norm(fields.number("rms_norm_eps", default=1e-5), wide=False)
    ffn = MLP(fields.integer("intermediate_size", default=14848), "geglu")
    block = SharedBlock(zamba2.shared_attention(fields, kv_heads_required=True), ffn, norm)
    kinds = zamba2.read_kinds(fields, _hybrid(fields))
    layers = zamba2.hybrid_layers(kinds, block, _mamba(fields), blocks=1)
    return assemble(NAME, fields, tuple(layers), norm, tied=True, max_length=zamba2.MAX_LENGTH)


def _hybrid(fields: Fields) -> list[int]:
    """Return the hybrid layers: the third, and after it one of each period."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    period = fields.integer("attn_layer_period", default=6)
    offset = fields.integer("attn_layer_offset", default=4, least=0)
    return [i for i in range(count) if i == 2 or (i > 2 and (i - 3) % period == offset)]


def _mamba(fields: Fields) -> Mamba1:
    fields.only("hidden_mamba_act", "silu")
    inner = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    heads = fields.integer("n_mamba_heads", default=2)
    if inner % heads:
        fields.refuse("n_mamba_heads", f"a divisor of mamba_expand times hidden_size ({inner})")
    return Mamba1(
        inner=inner,
        state_dim=fields.integer("mamba_d_state", default=16, least=2),
        rank=step_rank(fields, "mamba_dt_rank"),
        conv=fields.integer("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        heads=heads,
    )


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return the tensor layout: inputs and gates interleaved by row, and parameters split by head."""
    heads, channels = next(
        (mixer.heads, mixer.inner) for mixer in network.mixers() if isinstance(mixer, Mamba1)
    )

    def by_head(shape: Shape) -> Shape:
        return (heads, shape[0] // heads, *shape[1:])

    def in_turn() -> Tensor:
        return rows_by_kind(channels, (1, 1), (0, 1))

    mixer_rules = []
    for mixer, disk in (("mixer", "mamba"), ("mixer2", "mamba_decoder.mamba")):
        mixer_rules += [
            *layer_rules(
                rf"{mixer}\.in\.(weight|bias)", rf"{disk}.in_proj.\2", recipe=rows(in_turn, 2 * channels)
            ),
            *layer_rules(rf"{mixer}\.(x|dt)\.weight", rf"{disk}.\2_proj_weight", recipe=stored_as(by_head)),
            *layer_rules(rf"{mixer}\.dt_bias", f"{disk}.dt_proj_bias", recipe=stored_as(by_head)),
            *layer_rules(rf"{mixer}\.(A_log|D)", rf"{disk}.\2", recipe=stored_as(by_head)),
        ]
    return rules.table(network, *mixer_rules, *zamba2.outer_rules(network, "shared_transf"), *rules.MAMBA)
