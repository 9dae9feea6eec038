"""The report for people: a table for each temperature and batch, with a legend."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from specdec.bench.acceptance.settings import TRANSFORMERS, SettingGroup
from specdec.bench.acceptance.summary import ALL
from specdec.bench.report import setup_line, table
from specdec.config.drafters import AUTO, NONE

Record = Mapping[str, Any]

WIDTH = 110
"""Assumed terminal width, in columns."""

LEGEND = """\
length: output tokens per verify step, the bonus token included; straight: without looping texts
looping: outputs whose second half repeats itself at least three times
p10-p90: of length over prompts; of x none over batches
top-k: length with draft tokens ranked by the drafter's logits alone, without the target's noise
tok/s: output tokens over a batch's time, prefill included; median of batches
x none: speedup over none on the same prompts, in the same turn; drafts pay above 1
auto chosen: the engine's default, which picks drafters and shapes at run time; others are fastest first
by depth: acceptance rate of drafts that reached it; accepted 0 1 2 …: share of verify steps"""


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    said = [
        f"{report['model']}: {report['family']}, {report['dtype']}",
        setup_line(report),
        _checked(report),
        *(f"left out: {what}" for what in report["left_out"]),
    ]
    if report["interrupted"]:
        said.append("INTERRUPTED: these are the prompts that every setting had answered by then")
    lines = [part for line in said for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]
    for group, records in _groups(report["records"]):
        lines += [
            "",
            f"{group}, {_whole(records)['prompts']} prompts",
            "",
            _lengths(records),
            "",
            *_steps(records),
        ]
    legend = LEGEND.splitlines()
    if not any("top-k" in line for line in lines):
        legend = [line for line in legend if not line.startswith("top-k")]
    return "\n".join([*lines, "", *legend])


def _checked(report: Mapping[str, Any]) -> str:
    """Describe the result of the text comparison."""
    whole = [r for r in report["records"] if r["category"] == ALL and r["differing_texts"] is not None]
    drafted = [r for r in whole if r["setting"]["draft"] not in (NONE, TRANSFORMERS)]
    texts, other = sum(r["prompts"] for r in drafted), sum(r["differing_texts"] for r in drafted)
    line = f"checked: {texts - other} of {texts} texts with drafts are those without"
    for peer in (r for r in whole if r["setting"]["draft"] == TRANSFORMERS):
        line += f", {peer['prompts'] - peer['differing_texts']} of {peer['prompts']} of transformers' are"
    if not other:
        return line
    why = (
        f"{report['rounding']} rounds windows of different widths differently"
        if report["rounding"]
        else "near ties"
    )
    each = ", ".join(f"{r['name']} {r['differing_texts']}" for r in drafted if r["differing_texts"])
    return f"{line}; differing texts ({why}): {each}"


def _groups(records: Sequence[Record]) -> Iterator[tuple[SettingGroup, list[Record]]]:
    """Group the records by temperature and batch."""
    groups: dict[SettingGroup, list[Record]] = {}
    for record in records:
        setting = record["setting"]
        groups.setdefault(SettingGroup(setting["temperature"], setting["batch"]), []).append(record)
    yield from groups.items()


def _whole(records: Sequence[Record]) -> Record:
    return next(record for record in records if record["category"] == ALL)


def _lengths(records: Sequence[Record]) -> str:
    """Lay out every setting by category: the engine's default first, then by speed.

    A setting's twin without noise becomes a column.
    """
    plain = {(_twin(r), r["category"]): r for r in records if not r["setting"]["draft_noise"]}
    shared = {(r["name"], r["category"]) for r in records}
    own = [r for r in records if r["setting"]["draft_noise"] or (_twin(r), r["category"]) not in shared]
    categories = list(dict.fromkeys(record["category"] for record in own))
    own.sort(key=lambda r: (categories.index(r["category"]), not _is_default(r), -r["speedup"]["median"]))
    rows = []
    for record in own:
        row = {
            "category": record["category"],
            "setting": record["name"],
            "looping": str(record["looping"]),
            "length": _number(record["acceptance_length"]),
            "straight": _number(record["acceptance_length_not_looping"]),
            "p10-p90": _range(record["spread"]),
        }
        if plain:
            twin = plain.get((record["name"], record["category"]))
            row["top-k"] = _number(twin["acceptance_length"]) if twin else ""
        speed, ratio = record["tokens_per_second"], record["speedup"]
        rows.append(
            {
                **row,
                "ms/step": f"{sum(record['ms_per_step'].values()):.2f}",
                "tok/s": f"{speed['median']:,.1f}",
                "x none": f"{ratio['median']:.2f}",
                "p10-p90 ": _range([ratio["p10"], ratio["p90"]]),
            }
        )
    names, rule, first, *rest = table(rows).split("\n")
    lines = [names, rule, first]
    for (above, row), line in zip(pairwise(rows), rest, strict=True):
        lines += [line] if row["category"] == above["category"] else ["", line]
    return "\n".join(lines)


def _is_default(record: Record) -> bool:
    """Return whether a setting is the engine's default."""
    return record["setting"]["draft"] == AUTO and bool(record["setting"]["chosen"])


def _twin(record: Record) -> str:
    """Return the name of the same setting with the noise."""
    return str(record["name"]).removesuffix(" plain")


def _steps(records: Sequence[Record]) -> Iterator[str]:
    """Yield, for each setting that drafts, a summary of its steps and their time over all prompts."""
    whole = [r for r in records if r["category"] == ALL and r["drafted_per_step"]]
    for record in whole:
        spent = ", ".join(f"{phase} {ms:.2f}" for phase, ms in record["ms_per_step"].items() if ms)
        yield (
            f"{record['name']}: {record['drafted_per_step']:.1f} drafted per step, "
            f"{record['accepted_per_step']:.2f} accepted; ms: {spent}"
        )
        yield f"    by depth {_shares(record['per_depth'])}"
        steps = max(record["steps"], 1)
        yield f"    accepted 0 1 2 … {_shares([count / steps for count in record['histogram']])}"


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2f}-{pair[1]:.2f}"
