"""Draw the package's subpackages and their imports as docs/map.svg: `make map`.

Arrows implied by others are left out. A box lies just below those that import it.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from tests.imports import PACKAGE, ROOT, imported, modules, part_of

MAP = Path(ROOT, "docs", "map.svg")
BOXES: Mapping[str, str] = {
    "cli ray server bench": "commands and servers",
    "http": "connections",
    "reach": "bytes from other engines",
    "engine": "SpecEngine and its thread",
    "setup": "settings to a running loop",
    "core": "scheduler, step, requests",
    "models": "families, layers, weights",
    "draft": "drafters, trees, policy",
    "verify": "sampler and walk",
    "state_slots": "KV cache, state slots",
    "kernels": "one folder per operation",
    "text": "tokenizer, grammars",
    "config": "settings",
}
"""Captions of the boxes; every subpackage imports `errors`, which is left out."""

WIDTH, BOX_W, BOX_H, FLOOR_H = 960, 210, 46, 84

Arrows = Mapping[str, Set[str]]


def arrows() -> Arrows:
    """Return which box imports which. The imports of `specdec` itself count as the engine's."""
    box_of = {name: names for names in BOXES for name in names.split()}
    found: dict[str, set[str]] = {names: set() for names in BOXES}
    for module, path in modules():
        home = box_of.get(part_of(module))
        if home is None:
            continue
        for name in imported(path.read_text("utf-8"), module, is_package=path.name == "__init__.py"):
            if name.split(".")[0] == PACKAGE and (lower := part_of(name)) != "errors":
                found[home].add(box_of.get(lower, "engine"))
    return {box: lowers - {box} for box, lowers in found.items()}


def floors(found: Arrows) -> dict[str, int]:
    """Assign layers from the top: each box lies below all that import it. A cycle raises ValueError."""
    known: dict[str, int] = {}

    def descend(box: str, below: Sequence[str]) -> int:
        if box in below:
            raise ValueError("a cycle: " + " → ".join([box, *reversed(below[below.index(box) :])]))
        if box not in known:
            users = [upper for upper in found if box in found[upper]]
            known[box] = 1 + max((descend(upper, [*below, box]) for upper in users), default=-1)
        return known[box]

    for box in found:
        descend(box, [])
    return known


def direct(found: Arrows) -> list[tuple[str, str]]:
    """Return the arrows that others do not imply."""

    def below(box: str) -> set[str]:
        return set(found[box]).union(*(below(lower) for lower in found[box]))

    return [
        (box, lower)
        for box in found
        for lower in sorted(found[box])
        if not any(lower in below(other) for other in found[box])
    ]


def draw(found: Arrows) -> str:
    """Return the SVG: a row per layer, a box per subpackage, an arrow per import."""
    floor_of = floors(found)
    lowest = max(floor_of.values())
    places: dict[str, tuple[float, int]] = {}
    for floor in range(lowest + 1):
        boxes = [box for box in BOXES if floor_of[box] == floor]
        for i, box in enumerate(boxes):
            places[box] = WIDTH * (i + 0.5) / len(boxes), 20 + floor * FLOOR_H
    lines = [_arrow(places[upper], places[lower]) for upper, lower in direct(found)]
    boxes = [_box(box, *places[box]) for box in BOXES]
    height = 40 + lowest * FLOOR_H + BOX_H
    return "\n".join([_HEAD.format(width=WIDTH, height=height), *lines, *boxes, "</svg>", ""])


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The packages of specdec and their imports; arrows implied by others are left out</title>
<style>
  text {{ font: 12px system-ui, sans-serif; text-anchor: middle; fill: #57606a }}
  .name {{ font: 600 14px ui-monospace, monospace; fill: #1f2328 }}
  rect {{ fill: #f6f8fa; stroke: #8c959f }}
  path {{ fill: none; stroke: #8c959f; marker-end: url(#tip) }}
  #tip path {{ fill: #8c959f; stroke: none }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #9198a1 }} .name {{ fill: #f0f6fc }} rect {{ fill: #151b23; stroke: #656c76 }}
  }}
</style>
<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
  <path d="M0 0 8 4 0 8z"/>
</marker>"""


def _box(box: str, x: float, y: int) -> str:
    width = max(BOX_W, 9 * len(box) + 20)
    return (
        f'<rect x="{x - width / 2:g}" y="{y}" width="{width}" height="{BOX_H}" rx="6"/>'
        f'<text class="name" x="{x:g}" y="{y + 19}">{box}</text>'
        f'<text x="{x:g}" y="{y + 36}">{BOXES[box]}</text>'
    )


def _arrow(upper: tuple[float, int], lower: tuple[float, int]) -> str:
    (x, y), (to_x, to_y) = (upper[0], upper[1] + BOX_H), lower
    gap = FLOOR_H - BOX_H
    curve = f"C{x:g} {to_y - gap / 2:g} {to_x:g} {to_y - gap / 2:g} {to_x:g} {to_y}"
    return f'<path d="M{x:g} {y}V{to_y - gap}{curve}"/>'


if __name__ == "__main__":
    MAP.write_text(draw(arrows()), "utf-8")
    print(MAP.relative_to(ROOT))
