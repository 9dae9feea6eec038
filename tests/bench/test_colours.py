"""Colours of plots and token origins: readable, and distinct with colour vision deficiencies."""

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import specdec
from specdec.bench.plots import PALETTE

SIGHTS = {
    "whole": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "no green": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "no blue": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
"""Transforms of linear RGB that simulate a missing cone type."""
LMS = ((0.41222, 0.53633, 0.05145), (0.21190, 0.68070, 0.10740), (0.08830, 0.28172, 0.62998))
LAB = ((0.21045, 0.79362, -0.00407), (1.97800, -2.42859, 0.45059), (0.02590, 0.78277, -0.80868))

Vector = Sequence[float]


def product(matrix: Sequence[Vector], vector: Vector) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour: str) -> list[float]:
    channels = [byte / 255 for byte in bytes.fromhex(colour[1:])]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def seen(colour: str, sight: Sequence[Vector]) -> list[float]:
    """Return a colour's coordinates in Oklab, whose distances are perceptual."""
    cones = product(LMS, [min(max(c, 0.0), 1.0) for c in product(sight, linear(colour))])
    return product(LAB, [cone ** (1 / 3) for cone in cones])


def contrast(one: str, other: str) -> float:
    light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def theme_colours(text: str) -> dict[str, tuple[str, str]]:
    """Return the playground's colours by name, for its light and its dark theme."""
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", text)
    return {name: (light, dark) for name, light, dark in found}


def test_colours_of_plots_are_distinct_with_colour_vision_deficiencies() -> None:
    assert min(contrast(colour, "#ffffff") for colour in PALETTE) >= 3
    for name, sight in SIGHTS.items():
        places = [seen(colour, sight) for colour in PALETTE]
        assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) > 0.08, name
    # Red and green of equal lightness, which many cannot distinguish, must not pass.
    assert math.dist(seen("#c04040", SIGHTS["no green"]), seen("#708020", SIGHTS["no green"])) < 0.08


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_the_playgrounds_depths_are_a_scale_for_every_sight(theme: int) -> None:
    """Deeper is stronger, no depth looks like the verifier's own, and the text on each is readable."""
    text = (Path(specdec.__file__).parent / "server" / "web" / "theme.css").read_text("utf-8")
    least, span = map(int, re.findall(r"calc\((\d+)% \+ (\d+)% \* var\(--share\)\)", text)[theme])
    shares = [float(share) for share in re.findall(r"--share: ([\d.]+); }", text)]
    colours = theme_colours(text)
    paper, ink, muted, draft, own = (
        colours[name][theme] for name in ("paper", "ink", "muted", "draft", "own")
    )
    assert min(contrast(text_colour, paper) for text_colour in (ink, muted)) >= 4.5
    shades = [mixed(draft, paper, (least + span * share) / 100) for share in shares]
    verifier = mixed(own, paper, int(re.findall(r"var\(--own\) (\d+)%", text)[0]) / 100)
    assert len(shades) == 8 and min(contrast(ink, shade) for shade in (*shades, verifier)) >= 4.5
    for name, sight in SIGHTS.items():
        lightness = [seen(shade, sight)[0] for shade in (paper, *shades)]
        assert lightness == sorted(lightness, reverse=not theme), name
        assert min(abs(a - b) for a, b in itertools.pairwise(lightness)) > 0.02, name
        assert min(math.dist(seen(verifier, sight), seen(shade, sight)) for shade in shades) > 0.05, name


def mixed(one: str, other: str, share: float) -> str:
    channels = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(share * a + (1 - share) * b) for a, b in channels).hex()
