"""Draw docs/measured.svg, the plot in the README: `python -m tools.readme_plot`."""

from html import escape
from pathlib import Path
from typing import NamedTuple

PLOT = Path(__file__).parents[1] / "docs" / "measured.svg"


class Bar(NamedTuple):
    name: str
    value: float
    text: str


class Panel(NamedTuple):
    """One comparison: ours first. specdec/bench/LOG.md has the commands."""

    title: str
    machine: str
    bars: tuple[Bar, ...]


PANELS = (
    Panel(
        "Memory of 4 draft tokens (less is better)",
        "0.5b shape, bfloat16; AMD EPYC",
        (Bar("specdec", 1.5, "1.5 MB"), Bar("state snapshots", 78.9, "78.9 MB")),
    ),
    Panel(
        "Decode speed, 3 tokens accepted per step (more is better)",
        "0.5b shape, bfloat16, random weights, synthetic acceptance; AMD EPYC",
        (Bar("specdec, multi-token head", 2.35, "2.35 ×"), Bar("specdec without drafts", 1.0, "1 ×")),
    ),
    Panel(
        "Median TTFT behind a shared system prompt (less is better)",
        "tiny; AMD EPYC",
        (Bar("specdec", 17, "17 ms"), Bar("specdec without prefix caching", 148, "148 ms")),
    ),
    Panel(
        "Decode step without drafts, batch 1 (less is better)",
        "0.5b shape, bfloat16; Intel Xeon with AMX",
        (Bar("specdec", 55.3, "55.3 ms"), Bar("transformers 5.23", 113.1, "113.1 ms")),
    ),
    Panel(
        "Decode with 4-bit weights, batch 1 (more is better)",
        "0.8b shape, no drafts; AMD EPYC (Zen 4)",
        (Bar("specdec INT4", 48.1, "48 tok/s"), Bar("llama.cpp Q4_0", 33.5, "34 tok/s")),
    ),
    Panel(
        "Decode with 4-bit weights, batch 4 (more is better)",
        "0.8b shape, no drafts; AMD EPYC (Zen 4)",
        (Bar("specdec INT4", 127.1, "127 tok/s"), Bar("llama.cpp Q4_0", 45.7, "46 tok/s")),
    ),
)

WIDTH, PANEL_W, PANEL_H, GAP = 960, 464, 132, 12
LONGEST = 330
"""Width of the longest bar of a panel."""
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Measured on two CPU cores: specdec beside snapshots, transformers and llama.cpp</title>
<style>
  text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
  .dim {{ fill: #57606a; font-size: 12px }}
  .head {{ font-weight: 600; font-size: 14px }}
  .panel {{ fill: none; stroke: #d1d9e0 }}
  .ours {{ fill: #0969da }}
  .other {{ fill: #afb8c1 }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #f0f6fc }} .dim {{ fill: #9198a1 }} .panel {{ stroke: #3d444d }}
    .ours {{ fill: #4493f8 }} .other {{ fill: #656c76 }}
  }}
</style>"""


def draw() -> str:
    """Return the SVG: two panels a row, a bar per measurement."""
    rows = (len(PANELS) + 1) // 2
    lines = [HEAD.format(width=WIDTH, height=rows * (PANEL_H + GAP) + 4)]
    for i, panel in enumerate(PANELS):
        lines += _panel(panel, 8 + i % 2 * (PANEL_W + 16), 8 + i // 2 * (PANEL_H + GAP))
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, x: int, y: int) -> list[str]:
    most = max(bar.value for bar in panel.bars)
    lines = [
        f'<rect class="panel" x="{x}" y="{y}" width="{PANEL_W}" height="{PANEL_H}" rx="8"/>',
        f'<text class="head" x="{x + 16}" y="{y + 24}">{escape(panel.title)}</text>',
        f'<text class="dim" x="{x + 16}" y="{y + 120}">{escape(panel.machine)}</text>',
    ]
    for i, bar in enumerate(panel.bars):
        length, top = max(LONGEST * bar.value / most, 2), y + 36 + 36 * i
        lines += [
            f'<text class="dim" x="{x + 16}" y="{top + 10}">{escape(bar.name)}</text>',
            f'<rect class="{"other" if i else "ours"}" x="{x + 16}" y="{top + 15}" '
            f'width="{length:.0f}" height="14" rx="2"/>',
            f'<text x="{x + 24 + length:.0f}" y="{top + 27}">{escape(bar.text)}</text>',
        ]
    return lines


if __name__ == "__main__":
    PLOT.write_text(draw(), "utf-8")
    print(PLOT)
