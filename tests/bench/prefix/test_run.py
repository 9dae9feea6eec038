"""The command: its report agrees with itself, goes on where it was cut short, and refuses what is wrong."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specdec.bench.prefix import run
from specdec.bench.prefix.generate import generate
from specdec.bench.prefix.traces import write_trace
from specdec.cli import main
from tests.selection import EXHAUSTIVE

QUICK = ["bench", "prefix", "--json", "--trace", "system-prompts", "--sessions", "80", "--memory", "1GB,2GB"]
ERROR, INTERRUPTED = 2, 130

Capture = pytest.CaptureFixture[str]


def report_of(out: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(out)
    return found


def test_a_report_has_every_policy_with_every_memory(capsys: Capture, tmp_path: Path) -> None:
    assert main([*QUICK, "--out", str(tmp_path / "made")]) == 0
    captured = capsys.readouterr()
    report = report_of(captured.out)
    assert json.loads((tmp_path / "made" / "prefix.json").read_text()) == report
    records: list[dict[str, object]] = report["records"]  # type: ignore[assignment]
    assert {(r["policy"], r["memory_bytes"]) for r in records} == {
        (policy, memory) for policy in run.POLICIES for memory in (10**9, 2 * 10**9)
    }
    rates: dict[str, float] = {r["policy"]: r["hit_rate"] for r in records if r["memory_bytes"] == 2 * 10**9}  # type: ignore[misc]
    assert rates["none"] == 0 < rates["vLLM+"] < rates["LRU"] <= rates["best"]
    assert {r["tokens"] for r in records} == {records[0]["tokens"]}
    for line in captured.err.splitlines():
        assert len(line) <= 110, line
    for name in ("system-prompts-by-length", "system-prompts-by-memory"):
        root = ElementTree.fromstring((tmp_path / "made" / f"{name}.svg").read_text())
        words = {"".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")}
        assert {policy for policy in run.POLICIES if policy != "none"} <= words
        assert (tmp_path / "made" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    plots = [path for path in (tmp_path / "made").iterdir() if path.suffix in (".svg", ".png")]
    assert len(plots) == 4


def test_a_run_that_was_cut_short_goes_on(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*QUICK, "--policy", "vLLM+,LRU"]) == 0
    whole = report_of(capsys.readouterr().out)
    right, calls = run.simulate, 0

    def cut(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return right(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "simulate", cut)
    again = [*QUICK, "--policy", "vLLM+,LRU", "--out", str(tmp_path)]
    assert main(again) == INTERRUPTED
    part = report_of(capsys.readouterr().out)
    assert part["interrupted"] and len(part["records"]) == 2  # type: ignore[arg-type]
    assert main(again) == 0
    assert calls == 3 + 2
    rest = report_of(capsys.readouterr().out)
    assert rest["records"] == whole["records"]
    assert main([*again, "--seed", "1"]) == ERROR
    assert "another seed" in capsys.readouterr().err


def test_a_trace_of_ones_own_is_played(capsys: Capture, tmp_path: Path) -> None:
    assert main(["bench", "prefix", "--trace", "agents", "--sessions", "3", "--write", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    path = tmp_path / "agents.jsonl"
    assert str(path) in said
    quick = [
        "bench",
        "prefix",
        "--json",
        "--policy",
        "LRU",
        "--memory",
        "3GB",
        "--shape",
        "qwen3-next-80b-a3b",
    ]
    assert main([*quick, "--file", str(path)]) == 0
    read = report_of(capsys.readouterr().out)["records"]
    assert main([*quick, "--trace", "agents", "--sessions", "3"]) == 0
    assert report_of(capsys.readouterr().out)["records"] == read


@EXHAUSTIVE
def test_sizes_that_are_not_given_are_contended(capsys: Capture) -> None:
    assert (
        main(["bench", "prefix", "--trace", "lmsys", "--sessions", "120", "--policy", "LRU", "--json"]) == 0
    )
    records: list[dict[str, float]] = report_of(capsys.readouterr().out)["records"]  # type: ignore[assignment]
    rates = [r["hit_rate"] for r in records]
    assert len(rates) >= 3 and rates == sorted(rates) and rates[0] < 0.9 * rates[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--trace", "news"], "--trace"),
        (["--policy", "fifo"], "--policy"),
        (["--memory", "much"], "--memory"),
        (["--memory", "5GB,0"], "--memory"),
        (["--memory", "1MB"], "--memory: 1000000"),
        (["--shape", "none-such"], "shape"),
        (["--file", "none-such.jsonl"], "--file"),
        (["--out", __file__], "--out"),
        (["--requests", "3"], "--requests: it has no use without --engine"),
        (["--together", "1"], "--together:"),
        (["--max-tokens", "8"], "--max-tokens:"),
        (["--no-adaptive"], "--adaptive:"),
        (["--draft-model", "none"], "--draft-model:"),
        *(
            (["--engine", "tiny", f"--{name}", value], f"--{name}: it has no use with --engine")
            for name, value in (
                *(("write", "x"), ("file", "x"), ("sessions", "2"), ("shape", "0.5b")),
                *(("memory", "5GB"), ("policy", "LRU"), ("alive", "16")),
            )
        ),
        (["--engine", "tiny", "--trace", "agents-collapsed"], "--trace"),
    ],
)
def test_what_is_wrong_is_named(capsys: Capture, more: list[str], said: str) -> None:
    try:
        code = main(["bench", "prefix", *more])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == ERROR
    assert said in capsys.readouterr().err


def test_what_is_said_twice_is_measured_once(capsys: Capture) -> None:
    quick = ["--trace", "lmsys,lmsys", "--sessions", "2", "--memory", "1GB,1000MB", "--policy", "LRU,LRU"]
    assert main(["bench", "prefix", "--json", *quick]) == 0
    assert len(report_of(capsys.readouterr().out)["records"]) == 1  # type: ignore[arg-type]


def test_a_file_that_has_changed_is_another_run(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    quick = ["bench", "prefix", "--policy", "LRU", "--memory", "1GB", "--out", str(tmp_path / "made")]
    for seed, code in ((0, 0), (0, 0), (1, ERROR)):
        write_trace(generate("lmsys", seed, sessions=1), path)
        assert main([*quick, "--file", str(path)]) == code
    assert "another trace content" in capsys.readouterr().err


def test_a_file_with_the_name_of_a_trace_beside_it_is_refused(capsys: Capture, tmp_path: Path) -> None:
    write_trace(generate("lmsys", 1, sessions=1), tmp_path / "lmsys.jsonl")
    assert main(["bench", "prefix", "--trace", "lmsys", "--file", str(tmp_path / "lmsys.jsonl")]) == ERROR
    assert "rename the file" in capsys.readouterr().err


def test_nothing_kept_is_over_nothing(capsys: Capture) -> None:
    assert main([*QUICK[:-1], "2GB", "--policy", "none,vLLM+"]) == 0
    rows = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [row[3] for row in rows if row[:2] in (["none", "2"], ["vLLM+", "2"])] == ["-", "1.00"]


def test_a_broken_trace_is_named(capsys: Capture, tmp_path: Path) -> None:
    write_trace(generate("lmsys", 0, sessions=1), tmp_path / "t.jsonl")
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write("{}\n")
    assert main(["bench", "prefix", "--file", str(tmp_path / "t.jsonl")]) == ERROR
    assert "session_id" in capsys.readouterr().err
