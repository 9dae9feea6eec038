"""Training recipes. A recipe fixes every number, so that a seed determines the checkpoint."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from specdec.errors import ConfigError
from specdec.models.shapes import SHAPES
from tools.train_tiny.answers import ANSWER, PROMPT
from tools.train_tiny.stage import Phase, Plan
from tools.train_tiny.trunk import Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    shape: str
    """A named shape of Qwen3.5's family; the tokenizer gets its vocabulary size."""
    trunk: Plan
    unloop: Plan
    rounds: int
    """Rounds in which the trunk answers prompts and unlearns loops."""
    answers: int
    """Prompts per round."""
    said: int
    """Trunk answers that the heads train on, beside the text."""
    mtp: Plan
    eagle: Plan
    depth: int
    """Recursion depth for training heads."""
    draft_vocab: int
    """Vocabulary of the EAGLE head: the most frequent tokens of the corpus."""

    def __post_init__(self) -> None:
        longest = max(phase.length for plan in (self.mtp, self.eagle) for phase in plan.phases)
        assert longest <= PROMPT + ANSWER, "heads read rows of answers, which are no longer"

    @property
    def config(self) -> dict[str, Any]:
        return dict(SHAPES[self.shape])

    def sizes(self) -> Shape:
        """Return the modules' sizes."""
        config = self.config
        rope = config["rope_parameters"]
        given = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
        return Shape(
            **given, partial_rotary_factor=rope["partial_rotary_factor"], rope_theta=rope["rope_theta"]
        )

    def seeded(self, seed: int) -> "Recipe":
        """Return the same recipe with another seed."""
        plans = {
            name: replace(getattr(self, name), seed=seed) for name in ("trunk", "unloop", "mtp", "eagle")
        }
        return replace(self, **plans)


def _heads(*phases: Phase) -> Plan:
    return Plan(phases, matrix_rate=0.0, embedding_rate=1e-3, other_rate=4e-3, warm_up=20, decay=0.5)


def _unloop(*phases: Phase) -> Plan:
    return Plan(phases, matrix_rate=3e-3, embedding_rate=6e-4, other_rate=4.5e-4, warm_up=10)


RECIPES = MappingProxyType(
    {
        # The shipped checkpoint.
        "tiny": Recipe(
            name="tiny",
            shape="tiny",
            trunk=Plan(
                (Phase(1800, 16, 256), Phase(900, 8, 512)),
                matrix_rate=0.02,
                embedding_rate=4e-3,
                other_rate=3e-3,
            ),
            unloop=_unloop(Phase(200, 8, 256)),
            rounds=1,
            answers=1024,
            said=4096,
            mtp=_heads(Phase(2200, 8, 256)),
            eagle=_heads(Phase(2600, 8, 256)),
            depth=4,
            draft_vocab=3072,
        ),
        # A few minutes, to test the whole pipeline; the output is not valid Python.
        "sketch": Recipe(
            name="sketch",
            shape="tiny",
            trunk=Plan((Phase(40, 8, 128),), matrix_rate=0.02, embedding_rate=4e-3, other_rate=3e-3),
            unloop=_unloop(Phase(4, 4, 128)),
            rounds=1,
            answers=32,
            said=32,
            mtp=_heads(Phase(20, 4, 128)),
            eagle=_heads(Phase(20, 4, 128)),
            depth=3,
            draft_vocab=1024,
        ),
    }
)


def recipe(name: str) -> Recipe:
    """Return a recipe by name."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; there are {', '.join(sorted(RECIPES))}", field="recipe")
    return RECIPES[name]
