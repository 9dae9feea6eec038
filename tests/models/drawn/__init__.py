"""Random configurations of the families that stand on frames and mixers of others, a file each.

A file offers `draw(rng)`, a small random configuration; `agreeing(common)`, one of the sizes of
tests.models.agreeing; and `REFUSED`, changes of that one's fields that are refused, with the field and the
remedy that the error names.
"""

from collections.abc import Mapping
from random import Random
from typing import Any, Protocol

from transformers import PreTrainedConfig

from tests.models.drawn import (
    bamba,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    lfm2,
    lfm2_moe,
    mamba,
    mamba2,
    minimax,
    olmo_hybrid,
)


class Drawn(Protocol):
    REFUSED: tuple[tuple[dict[str, Any], str, str], ...]

    def draw(self, rng: Random) -> PreTrainedConfig: ...

    def agreeing(self, common: Mapping[str, Any]) -> PreTrainedConfig: ...


DRAWN: Mapping[str, Drawn] = {
    "granitemoehybrid": granite,
    "bamba": bamba,
    "mamba2": mamba2,
    "olmo_hybrid": olmo_hybrid,
    "falcon_h1": falcon_h1,
    "mamba": mamba,
    "jamba": jamba,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "minimax": minimax,
    "kimi_linear": kimi_linear,
}
