"""What a config says of weights that are stored in eight bits."""

from specdec.kernels.linear.fp8 import BLOCK
from specdec.models.fields import Fields

_FIELD = "quantization_config"


def stores_fp8(*levels: Fields) -> bool:
    """Tell whether a config, on any of its levels, announces 8-bit weights; refuse other quantised ones.

    How activations were to be rounded is not asked: they stay in the model's dtype, which is more exact.
    """
    return any([_announces(fields) for fields in levels])


def _announces(fields: Fields) -> bool:
    if not fields.get(_FIELD):
        return False
    announced = fields.within(_FIELD)
    needed = f"(8-bit floats in blocks of {BLOCK} by {BLOCK}), or the checkpoint that was not quantised"
    if announced.get("quant_method") != "fp8":
        announced.refuse("quant_method", f"'fp8' {needed}")
    if announced.get("fmt") not in (None, "e4m3"):
        announced.refuse("fmt", f"'e4m3' {needed}")
    if announced.get("weight_block_size") != [BLOCK, BLOCK]:
        announced.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] {needed}")
    return True
