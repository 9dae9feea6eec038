"""Comparing two results: what really moved is found, chance is not, and what does not compare is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.acceptance.compare import SAME, compare, read, render, run
from specdec.bench.report import Output
from specdec.errors import ConfigError
from tests.bench.acceptance.results import HOSTILE, by_depth, result


def find(
    comparison: dict[str, Any], name: str, category: str = "all", temperature: float = 0.0
) -> dict[str, Any]:
    return next(
        record
        for record in comparison["records"]
        if (record["name"], record["category"], record["setting"]["temperature"])
        == (name, category, temperature)
    )


def test_a_result_is_within_the_noise_of_itself() -> None:
    told = result()
    found = compare(told, copy.deepcopy(told))
    assert len(found["records"]) == len(told["records"])
    assert found["warnings"] == found["only_in_first"] == found["only_in_second"] == []
    for record in found["records"]:
        assert record["acceptance_length"]["difference"] == 0
        assert record["speedup"]["ratio"] == 1
        figures = [record["acceptance_length"], *record["per_depth"], record["speedup"]]
        assert {figure["verdict"] for figure in figures} == {SAME}


def test_a_field_that_is_newer_than_a_result_and_says_nothing_is_no_difference() -> None:
    told = result()
    later = copy.deepcopy(told)
    for record in later["records"]:
        record["setting"] |= {"draft_vocab": None}
    found = compare(told, later)
    assert len(found["records"]) == len(told["records"])
    for record in later["records"]:
        record["setting"] |= {"draft_vocab": 64}
    with pytest.raises(ConfigError):
        compare(told, later)


def test_what_moved_is_said_with_its_direction() -> None:
    before, after = result(prompts=16), result(seed=1, gain=0.1, prompts=16)
    for pair, verdict in (((before, after), "higher"), ((after, before), "lower")):
        record = find(compare(*pair), "mtp 4x1")
        for figure in (record["acceptance_length"], record["speedup"], record["tokens_per_second"]):
            assert figure["verdict"] == verdict
        moved = record["acceptance_length"]
        assert moved["difference"] == pytest.approx(moved["second"] - moved["first"])
        assert moved["interval"][0] < moved["difference"] < moved["interval"][1]
        assert find(compare(*pair), "none")["acceptance_length"]["verdict"] == SAME


def test_chance_alone_seldom_exceeds_the_noise() -> None:
    verdicts = []
    for seed in range(0, 20, 2):
        pair = [result(seed=own, prompts=12) for own in (seed, seed + 1)]
        for told in pair:
            told["records"] = [r for r in told["records"] if r["category"] == "code" and r["name"] != "none"]
        verdicts += [record["acceptance_length"]["verdict"] for record in compare(*pair)["records"]]
    assert len(verdicts) == 60
    assert sum(verdict != SAME for verdict in verdicts) <= 9


def test_pairing_finds_what_unpaired_prompts_would_hide() -> None:
    """Prompts differ from each other far more than the drafters do on any one of them."""
    accepted = [[0, steps] for steps in range(2, 40)]
    before = tiny([{"tokens": 100 + 40 * i, "steps": 60, "accepted": a} for i, a in enumerate(accepted)])
    after = tiny([{"tokens": 103 + 40 * i, "steps": 60, "accepted": a} for i, a in enumerate(accepted)])
    assert compare(before, after)["records"][0]["acceptance_length"]["verdict"] == "higher"
    shuffled = copy.deepcopy(after)
    for prompt, name in zip(
        shuffled["records"][0]["per_prompt"], reversed(range(len(accepted))), strict=True
    ):
        prompt["name"] = str(name)
    assert compare(before, shuffled)["records"][0]["acceptance_length"]["verdict"] == SAME


def tiny(prompts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Make a result of one record; prompts are named by their place unless they have a name."""
    named = [{"name": str(i), **by_depth(prompt["accepted"]), **prompt} for i, prompt in enumerate(prompts)]
    record = {
        "setting": {"draft": "mtp", "temperature": 0.0, "batch": 1},
        "name": "mtp 4x1",
        "category": "all",
        "acceptance_length": sum(p["tokens"] for p in named) / sum(p["steps"] for p in named),
        "per_depth": [0.5],
        "per_prompt": named,
    }
    return {"benchmark": "acceptance", "model": "tiny", "records": [record | more]}


def test_prompts_are_paired_by_name_whatever_their_order() -> None:
    prompts = [{"name": str(i), "tokens": 50 + 9 * i, "steps": 30, "accepted": [9, i]} for i in range(10)]
    found = compare(tiny(prompts), tiny(prompts[::-1]))["records"][0]
    assert found["acceptance_length"]["interval"] == [0, 0]
    same_name = [p | {"name": "again"} for p in prompts]
    assert compare(tiny(same_name), tiny(same_name))["records"][0]["prompts"] == 10


def test_only_common_prompts_are_compared_and_the_rest_is_told() -> None:
    prompts = [{"name": str(i), "tokens": 60, "steps": 30, "accepted": [9, i]} for i in range(10)]
    late = [p | {"tokens": 600} if int(p["name"]) > 7 else p for p in prompts]
    found = compare(tiny(prompts[:8]), tiny(late))
    assert found["records"][0]["acceptance_length"]["difference"] == 0
    assert found["records"][0]["prompts"] == 8 and found["records"][0]["prompts_only_in_second"] == 2
    assert any("2 in the second" in warning for warning in found["warnings"])


def test_a_depth_is_judged_by_the_drafts_that_reached_it() -> None:
    """Ninety drafts of one token and ten of two, all accepted: no worse than 100 of two, 90 of them right."""
    steps = {"tokens": 210, "steps": 100}
    short = {**steps, "accepted": [0, 90, 10], "reached": [100, 10], "followed": [100, 10]}
    deep = {**steps, "accepted": [0, 10, 90], "reached": [100, 100], "followed": [100, 90]}
    rates = [{"per_depth": [1.0, 1.0]}, {"per_depth": [1.0, 0.9]}]
    pair = (tiny([prompt] * 6, **own) for prompt, own in zip((short, deep), rates, strict=True))
    found = compare(*pair)["records"][0]["per_depth"][1]
    assert found["difference"] == pytest.approx(found["second"] - found["first"]) == pytest.approx(-0.1)
    assert found["verdict"] == "lower"


def test_speeds_of_the_same_batches_are_compared_in_pairs() -> None:
    """A category is three times as fast as another; a gain of a twentieth in both is still seen."""
    prompts = [{"tokens": 60, "steps": 20, "accepted": [10, 4, 6]}] * 3
    speeds = [1.0, 3.0, 1.1, 2.9, 1.05, 3.1]
    wide = {"speedup": {"median": 2.0, "p10": 1.0, "p90": 3.0}}

    def run(gain: float) -> dict[str, Any]:
        batches = [{"prompts": [str(i)], "speedup": own * gain} for i, own in enumerate(speeds)]
        for batch in batches:
            batch["tokens_per_second"] = batch["speedup"]
        return tiny(prompts, **wide, per_batch=batches)

    assert compare(run(1.0), run(1.05))["records"][0]["speedup"]["verdict"] == "higher"
    assert compare(run(1.0), run(1.0))["records"][0]["speedup"]["verdict"] == SAME
    few = [run(1.0), run(0.9)]
    for told in few:
        told["records"][0]["per_batch"] = told["records"][0]["per_batch"][:2]
    assert compare(*few)["records"][0]["speedup"]["verdict"] == "too few prompts"


def test_a_folder_of_a_run_is_its_result(tmp_path: Path) -> None:
    (tmp_path / "acceptance.json").write_text(json.dumps(result()))
    assert read(tmp_path) == result()


def test_the_acceptance_of_a_depth_is_that_of_the_histogram() -> None:
    prompts = [{"tokens": 60, "steps": 20, "accepted": [10, 4, 6]}] * 6
    better = [{"tokens": 70, "steps": 20, "accepted": [6, 4, 10]}] * 6
    depths = [{"per_depth": [0.5, 0.6]}, {"per_depth": [0.7, 10 / 14]}]
    found = compare(*(tiny(p, **d) for p, d in zip((prompts, better), depths, strict=True)))["records"][0][
        "per_depth"
    ]
    assert [one["difference"] for one in found] == pytest.approx([0.2, 10 / 14 - 0.6])
    assert [one["verdict"] for one in found] == ["higher", "higher"]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((100, 98, 102), (106, 103, 108), "higher"),
        ((100, 90, 110), (106, 95, 117), SAME),
        ((100, 98, 102), (94, 92, 96), "lower"),
        ((100, None, 102), (94, 92, 96), "no spread"),
        ((0, 0, 0), (94, 92, 96), "no spread"),
    ],
)
def test_speeds_compare_by_their_spreads(
    first: tuple[float, ...], second: tuple[float, ...], verdict: str
) -> None:
    prompts = [{"tokens": 60, "steps": 20, "accepted": [10, 4, 6]}] * 3
    pair = [
        tiny(prompts, speedup=dict(zip(("median", "p10", "p90"), speed, strict=True)))
        for speed in (first, second)
    ]
    found = compare(*pair)["records"][0]
    assert found["speedup"]["verdict"] == verdict
    assert found["tokens_per_second"]["verdict"] == "no spread"


def test_what_stands_in_one_result_alone_is_listed() -> None:
    before, after = result(), result()
    before["records"] = [r for r in before["records"] if r["name"] != "suffix"]
    after["records"] = [r for r in after["records"] if r["name"] != "mtp 4x1"]
    found = compare(before, after)
    assert {r["name"] for r in found["only_in_first"]} == {"mtp 4x1"}
    assert {r["name"] for r in found["only_in_second"]} == {"suffix"}
    assert "only in the first: mtp 4x1, temperature 0, batch 1, all" in render(found)


def test_other_circumstances_are_told() -> None:
    after = result()
    after |= {"model": "other", "versions": {"python": "3.11", "torch": "2.14.0"}}
    after["arguments"] = after["arguments"] | {"seed": 1}
    warnings = compare(result(), after)["warnings"]
    for name in ("model: tiny and other", "versions.torch: 2.13.0 and 2.14.0", "arguments.seed: 0 and 1"):
        assert any(name in warning for warning in warnings), warnings
    assert len(warnings) == 3


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    prompts = [{"name": "a", "tokens": 60, "steps": 20, "accepted": [10, 4, 6]}] * 3
    others = [p | {"name": "b"} for p in prompts]
    with pytest.raises(ConfigError, match="model: tiny and large"):
        compare(tiny(prompts), tiny(others) | {"model": "large"})
    with pytest.raises(ConfigError, match="the second result is a result of the benchmark 'throughput'"):
        compare(tiny(prompts), {"benchmark": "throughput", "records": [1]})
    with pytest.raises(ConfigError, match="holds no records"):
        compare({"benchmark": "acceptance", "records": []}, tiny(prompts))
    path = tmp_path / "result.json"
    for text, reason in (
        ("", "is JSON"),
        ("{", "is JSON"),
        ("[1]", "holds no records"),
        ("3", "holds no records"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match=reason):
            read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "absent.json")


def test_files_are_compared_and_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.log"
    first.write_text(json.dumps(result(), indent=1), "utf-8")
    second.write_text(f"a table\nand more\n{json.dumps(result(seed=1, gain=0.1))}\n", "utf-8")
    run(first, second, Output(as_json=True))
    captured = capsys.readouterr()
    shown, told = captured.err.splitlines(), json.loads(captured.out)
    assert told["benchmark"] == "acceptance comparison" and len(told["records"]) == 24
    assert any(line.startswith("mtp 4x4 of 16") for line in shown)
    assert told == json.loads(json.dumps(told)) and HOSTILE not in "".join(shown)


def test_two_comparisons_say_the_same() -> None:
    assert compare(result(), result(seed=1)) == compare(result(), result(seed=1))
