"""Random configurations of the families that reuse frames and mixers of others, a file each.

A file is named after its model type. It offers `draw(rng)`, a small random configuration; `agreeing(common)`,
a configuration of the sizes in tests.models.agreeing; and `REFUSED`, changes to that one's fields that are
refused, with the field and the remedy that the error names.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import Any, Protocol, cast

from transformers import PreTrainedConfig

from specdec.models import families


class Drawn(Protocol):
    REFUSED: tuple[tuple[dict[str, Any], str, str], ...]

    def draw(self, rng: Random) -> PreTrainedConfig: ...

    def agreeing(self, common: Mapping[str, Any]) -> PreTrainedConfig: ...


DRAWN: Mapping[str, Drawn] = {
    family: cast(Drawn, import_module(f"{__name__}.{family}"))
    for family in families.TITLES
    if find_spec(f"{__name__}.{family}")
}
