"""Check a dashboard's queries against /metrics: names, labels, and histogram buckets."""

import re
from collections.abc import Mapping

SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
WORDS = {"sum", "max", "rate", "by", "ignoring", "group_left", "histogram_quantile"}
NAME = r"[a-zA-Z_:][\w:]*"
SELECTOR = re.compile(rf"({NAME})\{{([^}}]*)\}}(\[\$__rate_interval\])?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"')
GROUPED = re.compile(rf"\bby \(([^)]*)\) \((?:rate\()?({NAME})\{{")
QUANTILE = re.compile(rf"histogram_quantile\(0\.\d+, sum by \(le\) \(rate\(({NAME})_bucket\{{")


def labels_of(text: str) -> dict[str, set[str]]:
    """Parse /metrics into the labels of each name."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(rf"({NAME})(?:\{{(.*)\}})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


def types_of(text: str) -> dict[str, str]:
    return dict(re.findall(rf"^# TYPE ({NAME}) (\w+)$", text, re.MULTILINE))


def faults(
    query: str, labels: Mapping[str, set[str]], types: Mapping[str, str], legend: str = ""
) -> list[str]:
    """List the parts of a query that /metrics lacks."""
    found, selectors = [], SELECTOR.findall(query)
    for name, matchers, is_range in selectors:
        if name not in labels:
            found.append(f"there is no {name}")
            continue
        if wrong := {*MATCHER.findall(matchers)} - labels[name] - SCRAPED:
            found.append(f"{name} has no label {wrong}")
        counts = types.get(re.sub(r"_(bucket|sum|count)$", "", name)) == "histogram" or name.endswith(
            "_total"
        )
        if is_range and not counts:
            found.append(f"{name} is no counter")
    grouped = GROUPED.findall(query)
    for by, name in grouped:
        if wrong := {*re.split(r",\s*", by)} - labels.get(name, set()):
            found.append(f"{name} has no label {wrong} to sum by")
    rest = SELECTOR.sub("", query)
    by_labels = {label for by, _ in grouped for label in re.split(r",\s*", by)}
    if stray := {*re.findall(NAME, rest)} - WORDS - by_labels:
        found.append(f"{stray} is neither a function nor a label")
    if query.count("by (") != len(grouped):
        found.append("it sums by labels of no series")
    quantiles = QUANTILE.findall(query)
    if query.count("histogram_quantile") != len(quantiles):
        found.append("histogram_quantile wants buckets and le")
    if any(
        types.get(name) != "histogram" or "le" not in labels.get(f"{name}_bucket", ()) for name in quantiles
    ):
        found.append(f"{quantiles} is no histogram")
    if wrong := {*re.findall(r"\{\{(\w+)\}\}", legend)} - by_labels:
        found.append(f"the legend names {wrong}")
    return found
