"""Pictures as SVG text, drawn without a plotting library: light and dark, for a page or as a file alone."""

from specdec.bench.charts.bars import Bars, bar_chart
from specdec.bench.charts.histograms import Histogram, histogram_chart
from specdec.bench.charts.lines import Line, line_chart
from specdec.bench.charts.scale import times
from specdec.bench.charts.style import NUM_COLOURS, STYLE

__all__ = [
    "NUM_COLOURS",
    "STYLE",
    "Bars",
    "Histogram",
    "Line",
    "bar_chart",
    "histogram_chart",
    "line_chart",
    "times",
]
