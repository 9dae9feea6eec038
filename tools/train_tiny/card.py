"""The model card: the checkpoint, its training data, stages and losses."""

import json
from pathlib import Path

from specdec.bench.plots import LineSeries, line_plot, render
from tools.train_tiny.corpus import HELD_OUT, HELD_OUT_LICENCES
from tools.train_tiny.recipe import Recipe

STAGES = {
    "trunk": "target",
    "unloop": "target, against circles",
    "mtp": "multi-token head",
    "eagle": "EAGLE-3 head",
}

_CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [speculative-decoding, qwen3_5, mtp, eagle3]
---

# {name}

A hybrid language model of Qwen3.5's architecture that specdec trained itself, small enough to ship with
the package: {layers} layers, every {interval}th attends and the others are gated delta nets; hidden {hidden},
vocabulary {vocab}. With it a multi-token head (`mtp.*`, in the same file) and an EAGLE-3 head (`eagle3/`,
which can say {draft_vocab} of the tokens). It exists so that drafters can be measured on a model that means
something. It knows Python's syntax and little else: no answer of it is to be relied on.

## Data

{documents} files, {characters:,} characters, {tokens:,} tokens: the sources of Python {python}'s standard
library, tests included (PSF licence), and the licence texts that Debian installs. Held out are
{held_out_documents} files ({held_out_characters:,} characters): those whose name's SHA-1 is below {held_out}
modulo 100, and the licences {licences}. Nothing else was read.

## Recipe

`python -m tools.train_tiny --recipe {name} --out FOLDER` (seed {seed}, torch {torch},
tokenizers {tokenizers}).

| stage | steps | tokens | minutes |
| --- | --- | --- | --- |
{stages}

Muon for the target's matrices, AdamW for the rest; constant rates, then a linear decay.
{circles}The heads learn the target's distribution, {depth} steps deep in the recursion that they are
run in: half of their rows are that text, half are 128 tokens of it and the 128 with which the target goes on
greedily, at {said:,} places. Weights are rounded to bfloat16 at the end.

![loss](loss.svg)

## Figures on what was held out

Loss {loss:.3f} a token; the first guess is right in {first_guess:.1%}. By depth, the share of places at which
a head's first guess is the target's (fed the text, not its own guesses): multi-token head {mtp};
EAGLE-3 head {eagle}.
"""


_CIRCLES = """\
Against circles the target answers {:,} training prompts greedily{}, and learns beside the
text that what it repeated there is unlikely (sequence-level unlikelihood).
"""


def write_card(
    out: Path, recipe: Recipe, about: dict[str, object], figures: dict[str, object], work: Path
) -> None:
    """Write README.md and the plot of the losses."""
    plans = {name: getattr(recipe, name) for name in STAGES}
    times = {"unloop": recipe.rounds}
    minutes = figures["minutes"]
    assert isinstance(minutes, dict)
    stages = "\n".join(
        f"| {title} | {times.get(name, 1) * plan.steps:,} | {times.get(name, 1) * plan.tokens(plan.steps):,} "
        f"| {minutes[name]:g} |"
        for (name, title), plan in zip(STAGES.items(), plans.values(), strict=True)
        if times.get(name, 1)
    )
    sizes, again = recipe.sizes(), f", {recipe.rounds} times" if recipe.rounds > 1 else ""
    card = _CARD.format(
        name=recipe.name,
        layers=sizes.num_hidden_layers,
        interval=sizes.full_attention_interval,
        hidden=sizes.hidden_size,
        vocab=sizes.vocab_size,
        draft_vocab=recipe.draft_vocab,
        depth=recipe.depth,
        seed=recipe.trunk.seed,
        said=recipe.said,
        circles=_CIRCLES.format(recipe.answers, again) if recipe.rounds else "",
        held_out=HELD_OUT,
        licences=", ".join(sorted(HELD_OUT_LICENCES)),
        stages=stages,
        mtp=_shares(figures["mtp_agreement"]),
        eagle=_shares(figures["eagle_agreement"]),
        **about,
        **{name: figures[name] for name in ("loss", "first_guess", "tokens")},
    )
    (out / "README.md").write_text(card, "utf-8")
    (out / "loss.svg").write_bytes(_curve(work))


def _shares(shares: object) -> str:
    assert isinstance(shares, list)
    return ", ".join(f"{share:.1%}" for share in shares)


def _curve(work: Path) -> bytes:
    """Plot each stage's loss by training tokens."""
    series = []
    for name in ("trunk", "mtp", "eagle"):
        lines = [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]
        series.append(
            LineSeries(
                STAGES[name], [line["tokens"] / 1e6 for line in lines], [line["loss"] for line in lines]
            )
        )
    return render(line_plot(series, "Training loss", "million tokens", "nats per token"), "svg")
