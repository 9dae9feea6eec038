"""Plots: every series is drawn with its values, text is text, files are complete and reproducible."""

import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from specdec.bench.plots import (
    NUM_COLOURS,
    BarSeries,
    LineSeries,
    bar_plot,
    inline_svg,
    line_plot,
    render,
    save_plot,
)
from specdec.cli import main
from specdec.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = '</text><script>alert(1)</script> & "it\'s" ]]> $x_1$ \\$ \x00\u2028 語'
NAN = math.nan


def texts(figure: Figure) -> list[str]:
    """Return the texts of a figure's SVG, which must be valid XML."""
    root = ElementTree.fromstring(render(figure, "svg"))
    assert root.tag == f"{SVG}svg" and not list(root.iter(f"{SVG}script"))
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def lines_of(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    """Return the points of each line."""
    (axes,) = figure.axes
    return {str(one.get_label()): (list(one.get_xdata()), list(one.get_ydata())) for one in axes.lines}


def check_lines(figure: Figure, expected: list[LineSeries]) -> None:
    """Check that each series is drawn with its values and named in the legend."""
    drawn, shown = lines_of(figure), texts(figure)
    assert drawn.keys() == {line.name for line in expected} <= {*shown}
    for line in expected:
        x, y = drawn[line.name]
        assert x == list(line.x)
        assert y == pytest.approx([NAN if value is None else value for value in line.y], nan_ok=True)


LINES = [LineSeries("mtp", [1, 2, 3], [0.9, None, 0.7]), LineSeries("suffix", [1, 2], [0.5, 0.25])]


def test_each_line_is_drawn_with_its_values_and_its_name() -> None:
    check_lines(line_plot(LINES, "t", "x", "y"), LINES)


@pytest.mark.parametrize("mutant", ["no series", "no value", "no name"])
def test_a_lost_series_is_found(mutant: str) -> None:
    figure = line_plot(LINES, "t", "x", "y")
    last = figure.axes[0].lines[1]
    if mutant == "no series":
        last.remove()
    elif mutant == "no value":
        last.set_data([1], [0.5])
    else:
        figure.legends[0].remove()
    with pytest.raises(AssertionError):
        check_lines(figure, LINES)


def test_gaps_and_labels() -> None:
    figure = line_plot(
        [LineSeries("s", [5, 10.5, 20], [0.5, NAN, 1])], "Title", "memory", "rate", percent=True
    )
    assert {"Title", "memory", "rate", "s", "100%"} <= {*texts(figure)}


def test_lines_that_share_a_colour_have_other_dashes() -> None:
    lines = [LineSeries(f"line {i}", [1, 2], [i, i]) for i in range(2 * NUM_COLOURS)]
    figure = line_plot(lines, "t", "x", "y")
    check_lines(figure, lines)
    looks = {(one.get_color(), one.get_linestyle()) for one in figure.axes[0].lines}
    assert len(looks) == len(lines)


def test_bars_have_their_values_and_error_bars() -> None:
    series = [
        BarSeries("greedy", [1.5, 2.0, None], [1.4, 1.8, None], [1.6, 2.3, None]),
        BarSeries("sampled", [1.1, NAN, 0.5]),
    ]
    figure = bar_plot(["a", "b", "c"], series, "t", "speedup", shown="{:.2f}×", reference=1.0)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [1.5, 2.0, 1.1, 0.5]
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in axes.patches] == [0, 1, 0, 2]
    shown = texts(figure)
    assert {"a", "b", "c", "greedy", "sampled", "speedup", "1.50×", "2.00×", "1.10×", "0.50×"} <= {*shown}
    (whiskers,) = (one for one in axes.collections if len(one.get_paths()) == 2)
    ends = [path.vertices[:, 0].tolist() for path in whiskers.get_paths()]  # type: ignore[index]
    assert ends == [pytest.approx([1.4, 1.6]), pytest.approx([1.8, 2.3])]
    assert axes.lines[-1].get_xdata() == [1.0, 1.0]


@pytest.mark.parametrize(
    "figure",
    [
        line_plot([], "t", "x", "y"),
        line_plot(
            [LineSeries("none", [], []), LineSeries("nothing", [1, 2], [None, NAN])],
            "t",
            "x",
            "y",
            percent=True,
        ),
        bar_plot([], [], "t", "x"),
        bar_plot(["a"], [BarSeries("s", [None])], "t", "x"),
    ],
)
def test_an_empty_plot_says_so(figure: Figure) -> None:
    assert "no data" in texts(figure)


def test_text_is_neither_markup_nor_mathematics() -> None:
    kept = '</text><script>alert(1)</script> & "it\'s" ]]> $x_1$ \\$ 語'
    for figure in (
        line_plot([LineSeries(HOSTILE, [1], [1]), LineSeries("_under", [1], [1])], HOSTILE, HOSTILE, HOSTILE),
        bar_plot([HOSTILE], [BarSeries(HOSTILE, [1]), BarSeries("_under", [2])], HOSTILE, HOSTILE),
    ):
        shown = texts(figure)
        assert kept in shown and "_under" in shown
        assert "<script" not in inline_svg(figure, HOSTILE)
        assert render(figure, "png").startswith(PNG)


def test_files_are_complete_and_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_plot(line_plot(LINES, "t", "x", "y"), tmp_path, name)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() == {"one.svg", "one.png", "two.svg", "two.png"}
    assert files["one.svg"] == files["two.svg"] and files["one.png"] == files["two.png"]
    assert files["one.png"].startswith(PNG) and b"date" not in files["one.svg"]


def test_missing_matplotlib_is_reported_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "acceptance", "tiny", "--draft", "suffix", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'specdec[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="pip install"):
        line_plot([], "t", "x", "y")
