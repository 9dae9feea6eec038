"""What is trained, for how long. A recipe fixes every number, so that a seed gives the same checkpoint."""

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
    """A named shape of Qwen3.5's kind; its vocabulary is what the tokenizer is taught."""
    trunk: Plan
    unloop: Plan
    rounds: int
    """How often the trunk answers anew and unlearns its circles."""
    answers: int
    """Prompts that it answers in a round."""
    said: int
    """Answers of the trunk that its heads learn from, beside the text."""
    mtp: Plan
    eagle: Plan
    depth: int
    """Steps of the recursion that a head is trained in."""
    draft_vocab: int
    """Tokens that the EAGLE head can say: the commonest of the corpus."""

    def __post_init__(self) -> None:
        longest = max(phase.length for plan in (self.mtp, self.eagle) for phase in plan.phases)
        assert longest <= PROMPT + ANSWER, "heads read rows of answers, which are no longer"

    @property
    def config(self) -> dict[str, Any]:
        return dict(SHAPES[self.shape])

    def sizes(self) -> Shape:
        """Return the shape as the modules want it."""
        config = self.config
        rope = config["rope_parameters"]
        given = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
        return Shape(
            **given, partial_rotary_factor=rope["partial_rotary_factor"], rope_theta=rope["rope_theta"]
        )

    def seeded(self, seed: int) -> "Recipe":
        """Return the same recipe with other draws."""
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
        # What ships.
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
        # A few minutes, to see the whole path work; what it writes is no Python.
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
    """Return a recipe by its name."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; there are {', '.join(sorted(RECIPES))}", field="recipe")
    return RECIPES[name]
