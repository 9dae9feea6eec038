"""The simulation's report as people read it."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.bench.prefix.figures import Record
from specdec.bench.report import table

WIDTH = 110
LEGEND = """\
hit: cached tokens, of all prompts'; x vLLM+, x LRU: over those with the same memory
FLOPs: prefill work saved, of all; KV, states: held at the ends of requests, mean, in GB, with
  what requests that live need; alpha: in use, one after the other
vLLM+: a state behind every block of 32 tokens, LRU; LRU: states where prompts part, at ends, and of chunks
tuned: the same with work saved per byte, alpha tuned as requests end; best: one alpha, the best afterwards"""


def render(report: Mapping[str, Any]) -> str:
    """Lay the report out."""
    layout = report["layout"]
    said = [
        f"{report['shape']}: a state takes {layout['state_bytes'] / 1e6:.1f} MB, "
        f"a token {layout['token_bytes'] / 1e3:.1f} kB",
        f"{report['cpu']}; commit {report['commit']}; seed {report['seed']}",
    ]
    if report["interrupted"]:
        said.append("INTERRUPTED: these are the runs that had ended by then")
    lines = [part for line in said for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]
    records = report["records"]
    for trace in dict.fromkeys(r["trace"] for r in records):
        own = [r for r in records if r["trace"] == trace]
        first = own[0]
        lines += [
            "",
            f"{trace}: {first['requests']:,} requests, {first['tokens']:,} tokens to read",
            "",
            table(list(_rows(own))),
        ]
    return "\n".join([*lines, "", *by_bin(records), LEGEND])


def _rows(records: Sequence[Record]) -> Iterator[dict[str, str]]:
    for r in records:
        equals = [o for o in records if o["memory_bytes"] == r["memory_bytes"] and r["policy"] != "none"]
        same = {o["policy"]: o["hit_rate"] for o in equals}
        yield {
            "policy": r["policy"],
            "GB": f"{r['memory_bytes'] / 1e9:g}",
            "hit %": f"{100 * r['hit_rate']:.2f}",
            "x vLLM+": _over(r["hit_rate"], same.get("vLLM+")),
            "x LRU": _over(r["hit_rate"], same.get("LRU")),
            "FLOPs %": f"{100 * r['flops_saved_share']:.2f}",
            "KV": f"{r['kv_bytes'] / 1e9:.2f}",
            "states": f"{r['state_bytes'] / 1e9:.2f}",
            "refused": str(r["refused"]),
            "alpha": _alphas(r["alphas"]),
        }


def _over(rate: float, other: float | None) -> str:
    return f"{rate / other:.2f}" if other else "-"


def _alphas(alphas: Sequence[float]) -> str:
    shown = [f"{alpha:g}" for alpha in alphas]
    return " ".join(shown if len(shown) <= 5 else [*shown[:2], "…", *shown[-2:]]) or "-"


def by_bin(records: Sequence[Record]) -> Iterator[str]:
    """Lay out the hit rates by the length of prompts, at the memory in the middle of the sweep."""
    for trace in dict.fromkeys(r["trace"] for r in records):
        sizes = sorted({r["memory_bytes"] for r in records if r["trace"] == trace})
        memory = sizes[len(sizes) // 2]
        own = [r for r in records if r["trace"] == trace and r["memory_bytes"] == memory]
        rows = [
            {
                "policy": r["policy"],
                **{b["tokens_each"]: f"{100 * b['hit_rate']:.1f}" for b in r["bins"]},
            }
            for r in own
        ]
        yield f"{trace}, {memory / 1e9:g} GB: hit % by the tokens of a prompt"
        yield ""
        yield table(rows)
        yield ""
