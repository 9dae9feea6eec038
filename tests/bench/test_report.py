import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from specdec import cli
from specdec.bench.report import ReportOutput, environment, json_line, percentile, publish, summarise, table
from tools.bench import __main__ as tools_bench


@pytest.mark.parametrize("count", [1, 2, 5, 63])
def test_percentile_equals_numpys(count: int) -> None:
    samples = np.random.default_rng(count).normal(size=count).tolist()
    for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert percentile(samples, fraction) == pytest.approx(np.quantile(samples, fraction))


def test_summary_ignores_one_wild_sample() -> None:
    calm = summarise([1.0] * 20)
    assert summarise([1.0] * 20 + [1e9]) == calm


def test_table_sets_text_left_and_figures_right() -> None:
    text = table([{"engine": "a", "ms": "9.0"}, {"engine": "longer", "ms": "10.0"}])
    assert text.splitlines() == ["engine    ms", "------  ----", "a        9.0", "longer  10.0"]


def test_json_line_is_one_line_of_six_digits() -> None:
    line = json_line({"a": {"b": [1 / 3, 2]}, "none": None, "count": 123456789})
    assert "\n" not in line
    assert json.loads(line) == {"a": {"b": [0.333333, 2]}, "none": None, "count": 123456789}


def test_environment_names_every_dependency_of_a_figure() -> None:
    found = environment()
    assert found["cpu"]
    assert found["threads"] > 0
    assert all(found["versions"][name] for name in ("python", "torch", "transformers"))


def test_a_report_is_a_table_unless_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "report.json"
    publish("a table", {"a": 1}, ReportOutput(kept))
    assert capsys.readouterr() == ("a table\n", "")
    assert kept.read_text() == '{"a": 1}\n'
    publish("a table", {"a": 1}, ReportOutput(as_json=True))
    assert capsys.readouterr() == ('{"a": 1}\n', "a table\n")


@pytest.mark.parametrize(
    "command",
    [
        *(partial(cli.main, ["bench", name, "--help"]) for name in cli.BENCHMARKS),
        *(partial(tools_bench.main, [name, "--help"]) for name in tools_bench.BENCHMARKS),
    ],
)
def test_every_benchmark_can_print_json(
    command: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command()
    assert "--json" in capsys.readouterr().out
