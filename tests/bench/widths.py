"""One width for all rows against up to three, for drafts of `tiny`'s own head and assumed step costs.

`python -m tests.bench.widths` prints the expected and the actual gain of both, relative to no drafts.
"""

from random import Random

from specdec import SamplingParams, SpecEngine
from specdec.bench.acceptance.prompts import bundled
from specdec.core.batch import StepReport
from specdec.draft.proposal import Proposal
from specdec.draft.widths import Curve, best_cut, gains

DEPTH, DRAWS = 7, 60
Draft = tuple[Proposal, int]
"""A chain, and its number of correct tokens."""


def drafts_at(engine: SpecEngine, temperature: float) -> list[Draft]:
    """Run the head on the bundled prompts, twice; return its calibrated chains and their outcomes."""
    speculation, kept = engine.model.loop.speculation, list[Draft]()

    def note(report: StepReport) -> None:
        for row, path in zip(report.result.rows, report.result.paths, strict=True):
            asked = speculation.acceptance._drafted.get(row.request.number)
            if row.is_drafted and asked and asked.merged.num_drafted == DEPTH:
                kept.append((asked.merged, len(path.nodes) - 1))

    prompts = [prompt.text for prompt in bundled() if prompt.text][:48]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    speculation.recall(None)
    engine.generate(prompts, params)
    engine.model.loop.observers.append(note)
    engine.generate(prompts, params)
    engine.model.loop.observers.remove(note)
    return kept


def compare(drafts: list[Draft], rows: int, token: float) -> str:
    """Return the expected and actual gain of one width and of up to three, for a given cost per token."""

    def curve(groups: int) -> Curve:
        return lambda nodes: 1 + token * (rows + nodes)

    rng, none = Random(1), rows / curve(1)(0)
    expected, came = [0.0, 0.0], [0.0, 0.0]
    for _ in range(DRAWS):
        drawn = [drafts[rng.randrange(len(drafts))] for _ in range(rows)]
        sums = [gains(proposal) for proposal, _ in drawn]
        for mixed in (False, True):
            cut = best_cut(sums, curve, mixed=mixed)
            true = sum(min(width, right) for width, (_, right) in zip(cut.widths, drawn, strict=True))
            expected[mixed] += cut.rate / none / DRAWS
            came[mixed] += (rows + true) / curve(1)(cut.nodes) / none / DRAWS
    shown = "{:.3f} and {:.3f}".format(*expected)
    return f"{shown} expected, came {came[0]:.3f} and {came[1]:.3f}: {came[1] / came[0] - 1:+.1%}"


def main() -> None:
    fields = {"adaptive": False, "num_steps": DEPTH, "topk": 1, "num_draft_tokens": DEPTH + 1}
    with SpecEngine("tiny", draft="mtp", max_running=16, **fields) as engine:
        found = {temperature: drafts_at(engine, temperature) for temperature in (1.0, 0.0)}
    for temperature, drafts in found.items():
        for rows in (8, 64):
            for share in (1, 2, 4, 8):
                says = compare(drafts, rows, 1 / rows / share)
                print(f"temperature {temperature:g}, {rows} rows, a token 1/{rows * share} of a pass: {says}")


if __name__ == "__main__":
    main()
