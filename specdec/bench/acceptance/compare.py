"""Two results side by side: what moved, and whether by more than chance moves it.

Acceptance is compared over the prompts that both asked, by a paired bootstrap: prompts are drawn with
replacement, the same ones for both results, and 95 % of the differences make the interval. Speeds have no
prompts in common: the interval of their ratio joins the spreads, p10 to p90, of both.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec.bench.acceptance.names import Record, field, plain, setting_key
from specdec.bench.acceptance.summary import RESULT
from specdec.bench.report import Output, publish, table
from specdec.errors import ConfigError

RESAMPLES, SEED = 2000, 0
INTERVAL = (0.025, 0.975)
SAME = "within the noise"
SIDES = ("first", "second")
LEGEND = """[ ] of acceptance: 95 % over resampled prompts, so one in twenty leaves it by chance; of speeds:
their ratio over the same batches. Tokens/s move with the machine too; a speed-up was measured within its run.
By depth: percentage points, where they exceed the noise."""

FEWEST = 5
"""Batches that two results must share for a difference of their speeds to be called one."""

Prompts = dict[tuple[str, int], dict[str, Any]]
Key = tuple[str, str]


def run(first: Path, second: Path, out: Output) -> None:
    """Compare two files and publish the comparison."""
    comparison = compare(read(first), read(second))
    publish(render(comparison), comparison, out)


def read(path: Path) -> dict[str, Any]:
    """Read a result: a JSON file, or an output whose last line is JSON."""
    path = path / RESULT if path.is_dir() else path
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--compare: {path} cannot be read ({error}); name a result", field="compare"
        ) from error
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        _check(found, str(path))
        return found  # type: ignore[no-any-return]
    raise ConfigError(f"--compare: neither {path} nor its last line is JSON; name a result", field="compare")


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Match the records of two results by setting and category and say what moved from first to second.

    Raise where they are no results of this benchmark or no record of theirs shares a prompt.
    """
    for name, result in zip(SIDES, (first, second), strict=True):
        _check(result, f"the {name} result")
    ours, theirs = _by_key(first), _by_key(second)
    both = [key for key in ours if key in theirs]
    compared = [_compare(ours[key], theirs[key]) for key in both]
    if not any(one["prompts"] for one in compared):
        differing = "; ".join(_differences(first, second)) or "nothing else"
        raise ConfigError(
            "--compare: no setting and category of the one result has a prompt of the other's; measure both "
            f"with the same prompts and settings (they differ in {differing})",
            field="compare",
        )
    return {
        "benchmark": "acceptance comparison",
        **{
            name: {part: result.get(part) for part in ("model", "commit", "machine")}
            for name, result in zip(SIDES, (first, second), strict=True)
        },
        "resamples": RESAMPLES,
        "seed": SEED,
        "warnings": list(_warnings(first, second, compared)),
        "records": compared,
        "only_in_first": [_identity(record) for key, record in ours.items() if key not in theirs],
        "only_in_second": [_identity(record) for key, record in theirs.items() if key not in ours],
    }


def render(comparison: Mapping[str, Any]) -> str:
    """Lay out a comparison for people: warnings, the table, what stands in one result alone."""
    parts = [f"warning: {warning}" for warning in comparison["warnings"]]
    parts.append(table([_shown(record) for record in comparison["records"]]))
    parts.append(LEGEND)
    for name in SIDES:
        alone = [_title(record) for record in comparison[f"only_in_{name}"]]
        if alone:
            parts.append(f"only in the {name}: " + "; ".join(alone))
    return "\n".join(parts)


def _check(result: Any, name: str) -> None:
    if isinstance(result, dict) and result.get("benchmark") == "acceptance" and result.get("records"):
        return
    found = result.get("benchmark") if isinstance(result, dict) else None
    what = (
        f"is a result of the benchmark {found!r}"
        if found != "acceptance" and found
        else "holds no records of it"
    )
    raise ConfigError(
        f"--compare: {name} {what}; name results of `specdec bench acceptance`", field="compare"
    )


def _by_key(result: Mapping[str, Any]) -> dict[Key, Record]:
    return {(setting_key(record), record.get("category") or "all"): record for record in result["records"]}


def _identity(record: Record) -> dict[str, Any]:
    return {name: record.get(name) for name in ("name", "category", "setting")}


def _title(record: Record) -> str:
    told = [
        f"{name} {plain(field(record, name))}"
        for name in ("temperature", "batch")
        if field(record, name) is not None
    ]
    return ", ".join([str(record.get("name")), *told, record.get("category") or "all"])


def _compare(first: Record, second: Record) -> dict[str, Any]:
    ours, theirs = _prompts(first), _prompts(second)
    common = [key for key in ours if key in theirs]
    pairs = [[found[key] for key in common] for found in (ours, theirs)]
    depths = min(len(r.get("per_depth") or []) for r in (first, second))
    return {
        **_identity(first),
        "prompts": len(common),
        "prompts_only_in_first": len(ours) - len(common),
        "prompts_only_in_second": len(theirs) - len(common),
        "acceptance_length": _paired(first, second, ("acceptance_length",), *map(_length, pairs)),
        "per_depth": [
            _paired(first, second, ("per_depth", d), *(_depth(found, d) for found in pairs))
            for d in range(depths)
        ],
        **{name: _speeds(first, second, name) for name in ("tokens_per_second", "speedup")},
    }


def _prompts(record: Record) -> Prompts:
    """Return a record's prompts by their names; of one name, by their order."""
    seen: Counter[str] = Counter()
    found: Prompts = {}
    for prompt in record.get("per_prompt") or []:
        name = str(prompt.get("name"))
        found[name, seen[name]] = prompt
        seen[name] += 1
    return found


def _length(prompts: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return what of each prompt makes the acceptance length: its tokens and its steps."""
    return torch.tensor([[p["tokens"], p["steps"]] for p in prompts], dtype=torch.float64).reshape(-1, 2)


def _depth(prompts: Sequence[dict[str, Any]], depth: int) -> torch.Tensor:
    """Return of each prompt's drafts that had a token at a depth, from 0, those that were accepted there."""
    counts = [[(p.get(part) or [])[depth : depth + 1] for part in ("followed", "reached")] for p in prompts]
    sums = [[sum(followed), sum(reached)] for followed, reached in counts]
    return torch.tensor(sums, dtype=torch.float64).reshape(-1, 2)


def _paired(
    first: Record, second: Record, path: tuple[str | int, ...], ours: torch.Tensor, theirs: torch.Tensor
) -> dict[str, Any]:
    """Compare two ratios of sums over the same prompts, [prompts, 2]: numerators beside denominators."""
    told = dict(zip(SIDES, (_at(first, path), _at(second, path)), strict=True))
    num = len(ours)
    if num < 2 or not ours[:, 1].sum() or not theirs[:, 1].sum():
        return {**told, "difference": None, "interval": None, "verdict": "too few prompts"}
    picks = torch.randint(num, (RESAMPLES, num), generator=torch.Generator().manual_seed(SEED))
    drawn = [found[picks].sum(1) for found in (ours, theirs)]
    kept = (drawn[0][:, 1] > 0) & (drawn[1][:, 1] > 0)
    differences = (drawn[1][:, 0] / drawn[1][:, 1] - drawn[0][:, 0] / drawn[0][:, 1])[kept]
    low, high = torch.quantile(differences, torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    (a, of_a), (b, of_b) = ours.sum(0).tolist(), theirs.sum(0).tolist()
    return {
        **told,
        "difference": b / of_b - a / of_a,
        "interval": [low, high],
        "verdict": _verdict(low, high),
    }


def _at(record: Record, path: Sequence[str | int]) -> Any:
    value: Any = record
    for key in path:
        value = value[key] if isinstance(key, int) else value.get(key)
    return value


def _speeds(first: Record, second: Record, name: str) -> dict[str, Any]:
    """Compare a speed by its ratio on the same batches of prompts; without any, by the spreads of both."""
    ours, theirs = (
        {tuple(b["prompts"]): b[name] for b in own.get("per_batch") or []} for own in (first, second)
    )
    ratios = [math.log(theirs[key] / ours[key]) for key in ours if key in theirs]
    if not ratios:
        return _ratio(first.get(name), second.get(name))
    medians = [(own.get(name) or {}).get("median") for own in (first, second)]
    told = dict(zip(SIDES, medians, strict=True))
    if len(ratios) < FEWEST:
        return {**told, "ratio": math.exp(median(ratios)), "interval": None, "verdict": "too few prompts"}
    found, generator = torch.tensor(ratios, dtype=torch.float64), torch.Generator().manual_seed(SEED)
    drawn = found[torch.randint(len(found), (RESAMPLES, len(found)), generator=generator)].median(1).values
    low, high = torch.quantile(drawn, torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return {
        **told,
        "ratio": math.exp(float(found.median())),
        "interval": [math.exp(low), math.exp(high)],
        "verdict": _verdict(low, high),
    }


def _ratio(
    first: Mapping[str, float | None] | None, second: Mapping[str, float | None] | None
) -> dict[str, Any]:
    """Compare two speeds by their ratio: the distances of p10 and p90 from the medians add as squares."""
    parts = ("median", "p10", "p90")
    a, b = ([(one or {}).get(part) for part in parts] for one in (first, second))
    told = dict(zip(SIDES, (a[0], b[0]), strict=True))
    if not all(value is not None and math.isfinite(value) and value > 0 for value in (*a, *b)):
        return {**told, "ratio": None, "interval": None, "verdict": "no spread"}
    (mid_a, low_a, high_a), (mid_b, low_b, high_b) = ([math.log(v or 1) for v in own] for own in (a, b))
    ratio = mid_b - mid_a
    low, high = (
        ratio - math.hypot(mid_b - low_b, high_a - mid_a),
        ratio + math.hypot(high_b - mid_b, mid_a - low_a),
    )
    return {
        **told,
        "ratio": math.exp(ratio),
        "interval": [math.exp(low), math.exp(high)],
        "verdict": _verdict(low, high),
    }


def _verdict(low: float, high: float) -> str:
    return "higher" if low > 0 else "lower" if high < 0 else SAME


def _warnings(
    first: dict[str, Any], second: dict[str, Any], compared: Sequence[dict[str, Any]]
) -> Iterator[str]:
    for difference in _differences(first, second):
        yield f"the results differ in {difference}"
    alone = [max(one[f"prompts_only_in_{name}"] for one in compared) for name in SIDES]
    if any(alone):
        yield (
            f"the prompts differ: up to {alone[0]} of a record stand in the first alone, {alone[1]} in the "
            "second; differences and intervals are over the common ones"
        )
    unpaired = sum(not one["prompts"] for one in compared)
    if unpaired:
        yield f"{unpaired} records have no prompt in common: only their speeds compare"


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """List what is said of two results' circumstances that is not the same."""
    found = []
    for name in {**first, **second}:
        if name in {"records", "examples", "benchmark", "commit"}:
            continue
        a, b = first.get(name), second.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
            found += [f"{name}.{key}: {a.get(key)} and {b.get(key)}" for key in keys]
        elif a != b:
            found.append(f"{name}: {a} and {b}")
    return found


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    length, setting = record["acceptance_length"], record["setting"] or {}
    depths = [
        f"{depth}: {one['difference'] * 100:+.1f}"
        for depth, one in enumerate(record["per_depth"], 1)
        if one["verdict"] in ("higher", "lower")
    ]
    return {
        "setting": str(record["name"]),
        "temperature": plain(setting.get("temperature")),
        "batch": plain(setting.get("batch")),
        "category": record["category"] or "all",
        "prompts": str(record["prompts"]),
        "length": " → ".join("–" if length[name] is None else f"{length[name]:.2f}" for name in SIDES),
        "moved": _moved(length, "difference", "+.2f"),
        "tokens/s": _moved(record["tokens_per_second"], "ratio", ".2f"),
        "speed-up": _moved(record["speedup"], "ratio", ".2f"),
        "by depth": ", ".join(depths) or "–",
    }


def _moved(figure: Mapping[str, Any], by: str, form: str) -> str:
    """Write by how much a figure moved, between which bounds, and what that means."""
    if figure["interval"] is None:
        return str(figure["verdict"])
    low, high = figure["interval"]
    return f"{figure['verdict']:<{len(SAME)}} {figure[by]:{form}} [{low:{form}}, {high:{form}}]"
