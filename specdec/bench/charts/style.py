"""What all pictures share: colours for light and dark, widths of texts, elements, the frame of a document."""

from collections.abc import Sequence
from html import escape

LIGHT = ("#1863bd", "#b8562f", "#1f9a87", "#683270", "#bf8600", "#2f373d")
DARK = ("#6590f0", "#f49841", "#62e3c0", "#bb6698", "#f8e06a", "#a9adba")
"""Told apart by people who see no red, no green or no blue, and 3:1 or more against the paper."""
NUM_COLOURS = len(LIGHT)
GROUND = {
    "paper": ("#ffffff", "#15181c"),
    "ink": ("#1c2126", "#e8ebee"),
    "muted": ("#59626c", "#a3adb7"),
    "rule": ("#dfe3e7", "#343b43"),
}
"""What is not a series, in light and in dark."""
COLOURS = GROUND | {f"c{i}": pair for i, pair in enumerate(zip(LIGHT, DARK, strict=True))}
DASHES = ("", "7 4", "2 4", "9 3 2 3")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
SMALL, BODY, TITLE = 11, 12, 15
BOLD = 1.15
"""By how much a bold text is wider."""
WIDTH, PADDING = 760, 16

_NARROW, _WIDE = set(" .,:;|!'ijlftr()[]/-"), set("mwMWQO@%")


def _variables(theme: int) -> str:
    return ";".join(f"--chart-{name}:{pair[theme]}" for name, pair in COLOURS.items())


def _paint(selector: str, prop: str, name: str) -> str:
    """Set a colour twice: programs that know no variables keep the light one."""
    return f".chart {selector}{{{prop}:{COLOURS[name][0]};{prop}:var(--chart-{name})}}"


def _style() -> str:
    series = [name for name in COLOURS if name not in GROUND]
    rules = [
        f":root{{{_variables(0)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}",
        f".chart{{font-family:{FONT};font-size:{BODY}px;font-variant-numeric:tabular-nums;"
        "max-width:100%;height:auto}",
        _paint(".paper", "fill", "paper"),
        _paint("text", "fill", "ink"),
        _paint("text.muted", "fill", "muted"),
        _paint(".rule", "stroke", "rule"),
        _paint(".axis", "stroke", "muted"),
        _paint(".whisker", "stroke", "ink"),
        f".chart .title{{font-size:{TITLE}px;font-weight:600}}",
        f".chart .small{{font-size:{SMALL}px}}",
        ".chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}",
        ".chart .band{stroke:none;opacity:.18}",
        *(_paint(f".s{name[1:]}", "stroke", name) for name in series),
        *(_paint(f".f{name[1:]}", "fill", name) for name in series),
    ]
    return "\n".join(rules)


STYLE = _style()
"""What a page that shows several pictures states once; a picture alone carries it."""


def text_width(text: str, size: float = BODY) -> float:
    """Guess how wide a text is drawn, on the wide side: the reader's font is not known."""
    ems = sum(
        0.36 if c in _NARROW else 0.92 if c in _WIDE else 1.0 if ord(c) > 0x2E7F else 0.62 for c in text
    )
    return ems * size


def cut(text: str, room: float, size: float = BODY) -> str:
    """Shorten a text to the room there is, marked by an ellipsis."""
    text = " ".join(text.split())
    if text_width(text, size) <= room:
        return text
    while text and text_width(f"{text}…", size) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"


def wrap(text: str, room: float, size: float = BODY, most: int = 2) -> list[str]:
    """Break a text into lines; what is left over is cut from the last."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if len(lines) == most or not lines[-1] or text_width(longer, size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return [cut(line, room, size) for line in lines]


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Write an element; `_` in a name stands for `-`, and a trailing one keeps clear of Python's words.

    The content is markup: who passes a text escapes it, as `label` does.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    ]
    return f"<{name}{''.join(parts)}>{content}</{name}>" if content else f"<{name}{''.join(parts)}/>"


def label(text: str, x: float, y: float, *, class_: str = "", anchor: str = "", whole: str = "") -> str:
    """Write a text at a place; `whole` is what it stands for where it was cut."""
    hint = tag("title", escape(whole)) if whole and whole != text else ""
    return tag("text", hint + escape(text), x=round(x, 1), y=round(y, 1), class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    x1, y1, x2, y2 = (round(v, 1) for v in (x1, y1, x2, y2))
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def legend(entries: Sequence[tuple[str, str]], top: float, width: float) -> tuple[str, float]:
    """Set swatches and names in as many rows as they need; return them and where the next thing may begin.

    A swatch is markup within 22 × 12 around its middle at (11, 0).
    """
    x, y, parts = float(PADDING), top + 10, []
    for swatch, name in entries:
        shown = cut(name, width - 2 * PADDING - 30)
        needed = 30 + text_width(shown)
        if x > PADDING and x + needed > width - PADDING:
            x, y = float(PADDING), y + 20
        place = f"translate({x:.1f} {y:.1f})"
        parts.append(tag("g", swatch + label(shown, 28, 4, whole=name), transform=place))
        x += needed + 14
    return "".join(parts), y + 14 if entries else top


def paragraph(
    text: str, x: float, y: float, room: float, *, class_: str = "muted", size: int = BODY, most: int = 3
) -> tuple[str, float]:
    """Write a text downwards from a place, in the lines it needs; return it and its last line's place."""
    lines = wrap(text, room, size, most)
    height = size + 4
    parts = [label(one, x, y + i * height, class_=class_, whole=text) for i, one in enumerate(lines)]
    return "".join(parts), y + (len(lines) - 1) * height


def heading(title: str, width: float) -> tuple[str, float]:
    """Write the title over what the picture has to show; return it and where the next thing may begin."""
    room = (width - 2 * PADDING) / BOLD
    text, last = paragraph(title, PADDING, 26, room, class_="title", size=TITLE)
    return text, last + 14


def document(body: str, width: float, height: float, *, title: str, description: str, alone: bool) -> str:
    """Close a picture: with a title for screen readers, and with its style where it stands alone."""
    height = round(height)
    name, about = tag("title", escape(title)), tag("desc", escape(description))
    style = tag("style", STYLE) if alone else ""
    paper = tag("rect", class_="paper", width=width, height=height)
    return tag(
        "svg",
        name + about + style + paper + body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        class_="chart",
        role="img",
    )
