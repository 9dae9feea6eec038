"""Summaries of measurements: one record per setting and category, and one over all categories."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from specdec.bench.acceptance.measure import MeasuredAnswer, Measurement
from specdec.bench.acceptance.settings import TRANSFORMERS, Setting
from specdec.bench.report import SampleSummary, percentile, summarise
from specdec.core.stats import PHASES

ALL = "all"
RESULT = "acceptance.json"
"""File name of a finished run's report."""


@dataclass(frozen=True, slots=True)
class PairedBatch:
    """One batch of prompts in one setting, and the same batch without drafts."""

    category: str
    own: Measurement
    plain: Measurement

    @property
    def speedup(self) -> float:
        return self.own.tokens_per_second / self.plain.tokens_per_second

    @property
    def differing(self) -> int:
        return sum(
            a.token_ids != b.token_ids for a, b in zip(self.plain.answers, self.own.answers, strict=True)
        )


def records(measured: Mapping[Setting, Sequence[PairedBatch]]) -> list[dict[str, Any]]:
    """Summarise each setting by category, in prompt order, and over all."""
    found = []
    for setting, pairs in measured.items():
        categories = list(dict.fromkeys(pair.category for pair in pairs))
        for category in (ALL, *categories):
            some = [pair for pair in pairs if category in (ALL, pair.category)]
            found.append(_record(setting, category, some))
    return found


def _record(setting: Setting, category: str, pairs: Sequence[PairedBatch]) -> dict[str, Any]:
    answers = [answer for pair in pairs for answer in pair.own.answers]
    steps = sum(answer.steps for answer in answers)
    followed, reached = _sums(a.followed for a in answers), _sums(a.reached for a in answers)
    # `transformers` is greedy whatever the temperature.
    draws_otherwise = setting.name == TRANSFORMERS and setting.group.temperature > 0
    lengths = [answer.length for answer in answers if answer.length is not None]
    return {
        "setting": setting.describe(),
        "name": setting.name,
        "category": category,
        "prompts": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "looping": sum(answer.is_looping for answer in answers),
        "differing_texts": None if draws_otherwise else sum(pair.differing for pair in pairs),
        "steps": steps,
        "acceptance_length": acceptance_length(answers),
        "acceptance_length_not_looping": acceptance_length([a for a in answers if not a.is_looping]),
        "spread": [percentile(lengths, 0.1), percentile(lengths, 0.9)] if lengths else None,
        "per_prompt": [_prompt(answer) for answer in answers],
        "per_depth": [f / r if r else 0.0 for f, r in zip(followed, reached, strict=True)],
        "histogram": _sums(a.histogram for a in answers),
        "drafted_per_step": sum(a.drafted for a in answers) / steps if steps else 0.0,
        "accepted_per_step": sum(followed) / steps if steps else 0.0,
        "ms_per_step": _ms_per_step([pair.own for pair in pairs]),
        "tokens_per_second": _whole(summarise([pair.own.tokens_per_second for pair in pairs])),
        "speedup": _whole(summarise([pair.speedup for pair in pairs])),
        "per_batch": [_batch(pair) for pair in pairs],
        "reading_seconds": sum(pair.own.reading_s for pair in pairs),
        "seconds": sum(pair.own.seconds for pair in pairs),
    }


def _prompt(answer: MeasuredAnswer) -> dict[str, Any]:
    """Describe one prompt, with the counts needed to compare two runs prompt by prompt."""
    return {
        "name": answer.name,
        "category": answer.category,
        "tokens": answer.tokens,
        "steps": answer.steps,
        "accepted": list(answer.histogram),
        "reached": list(answer.reached),
        "followed": list(answer.followed),
        "looping": answer.is_looping,
    }


def _batch(pair: PairedBatch) -> dict[str, Any]:
    """Return the speed of one batch: two runs can be compared batch by batch."""
    return {
        "prompts": [f"{answer.category}/{answer.name}" for answer in pair.own.answers],
        "tokens_per_second": pair.own.tokens_per_second,
        "speedup": pair.speedup,
    }


def acceptance_length(answers: Sequence[MeasuredAnswer]) -> float | None:
    """Return the tokens per verify step over some answers; None without steps."""
    steps = sum(answer.steps for answer in answers)
    return sum(answer.tokens for answer in answers) / steps if steps else None


def _ms_per_step(measured: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean time per engine step by phase, whatever rows took part."""
    timed = max(sum(own.timed for own in measured), 1)
    return {phase: 1e3 * sum(own.phases[phase] for own in measured) / timed for phase in PHASES}


def _sums(columns: Iterable[Sequence[int]]) -> list[int]:
    """Add up lists of different lengths, entry by entry."""
    return [sum(entries) for entries in zip_longest(*columns, fillvalue=0)]


def _whole(summary: SampleSummary) -> dict[str, float]:
    return summary._asdict()
