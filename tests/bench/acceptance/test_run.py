"""The benchmark on a small model: figures agree with each other, and are withheld if a text is wrong."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.bench import agreement
from specdec.bench.acceptance import run
from specdec.bench.acceptance.engines import EngineCache
from specdec.bench.acceptance.measure import AnswerLength, Measurement, TokenizedPrompt, measure, params_for
from specdec.bench.acceptance.plots import PLOTS
from specdec.bench.acceptance.settings import Drafting, SettingGroup
from specdec.cli import main
from specdec.config.engine import EngineConfig
from specdec.core.speculation import Speculation
from specdec.draft.proposal import DraftShape
from specdec.draft.rounded import RoundedDrafter
from specdec.setup.build import LoadedModel
from tests.models.agreeing import VOCAB
from tests.selection import EXHAUSTIVE

CHAIN, TREE = Drafting("mtp", DraftShape(4, 1, 5)), Drafting("mtp", DraftShape(4, 4, 16))
TIMES = {"ms_per_step", "tokens_per_second", "speedup", "per_batch", "seconds", "reading_seconds"}
QUICK = ["--max-tokens", "12", "--ignore-eos", "--warmup", "1", "--limit", "2", "--dtype", "float32"]

Bench = Callable[..., int]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def bench(agreeing: Path, prompts: Path) -> Bench:
    def call(*more: str) -> int:
        return main(
            ["bench", "acceptance", str(agreeing), "--prompts", str(prompts), *QUICK, "--json", *more]
        )

    return call


def report_of(out: str) -> dict[str, Any]:
    return json.loads(out)


def figures(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of fixed shapes without timings; chosen shapes depend on timing."""
    fixed = [record for record in report["records"] if not record["setting"]["chosen"]]
    return [{name: x for name, x in record.items() if name not in TIMES} for record in fixed]


def examples(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the examples of fixed shapes; chosen shapes depend on timing."""
    return [example for example in report["examples"] if " chosen" not in example["setting"]]


def test_a_report_has_every_setting_in_every_category(bench: Bench, capsys: Capture, tmp_path: Path) -> None:
    swept = ["--draft", "mtp,suffix,eagle", "--shape", "4:1:5,4:4:16,2:1:9", "--adaptive"]
    groups = ["--temperature", "0,1", "--batch", "1,2", "--draft-noise", "shared,none"]
    out = tmp_path / "made" / "here"
    assert bench(*swept, *groups, "--peers", "transformers", "--limit", "1", "--out", str(out)) == 0
    captured = capsys.readouterr()
    shown, report = captured.err, report_of(captured.out)
    assert json.loads((out / "acceptance.json").read_text()) == report
    plots = {f"{name}.{kind}" for name in PLOTS for kind in ("svg", "png")}
    assert plots | {"index.html"} <= {path.name for path in out.iterdir()}
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == report[
        "records"
    ]
    found = {
        (r["name"], r["setting"]["temperature"], r["setting"]["batch"], r["category"])
        for r in report["records"]
    }
    names = {"none", *(f"{d} {s}" for d in ("mtp", "suffix", "eagle") for s in ("4x1", "4x4:16", "chosen"))}
    plain = {f"{d} {s} plain" for d in ("mtp", "eagle") for s in ("4x1", "4x4:16")}
    assert found == {
        (name, temperature, batch, category)
        for temperature in (0.0, 1.0)
        for batch in (1, 2)
        for name in names
        | (plain if temperature else set())
        | ({"transformers"} if batch == 1 and not temperature else set())
        for category in ("all", "code", "edit", "prose")
    }
    assert any(what.startswith("mtp 2x1:9: num_draft_tokens") for what in report["left_out"])
    assert {"commit", "machine", "versions", "model", "arguments", "examples"} <= report.keys()
    assert report["arguments"]["shape"] == ["4:1:5", "4:4:16", "2:1:9"]
    for record in report["records"]:
        agrees_with_itself(record)
    for line in shown.splitlines():
        assert len(line) <= 110, line
    # With draft noise a tree contains more of a sampled text than one of the most probable tokens.
    length = {
        (r["name"], r["category"]): r["acceptance_length"]
        for r in report["records"]
        if r["setting"]["temperature"]
    }
    assert length["mtp 4x4:16", "all"] > length["mtp 4x4:16 plain", "all"]
    assert "top-k" in shown and "temperature 1, batch 2" in shown


def agrees_with_itself(record: dict[str, Any]) -> None:
    each = record["per_prompt"]
    assert record["prompts"] == len(each)
    assert record["differing_texts"] == 0 or record["name"] == "transformers"
    assert record["tokens"] == sum(own["tokens"] for own in each)
    assert record["steps"] == sum(own["steps"] for own in each) == sum(record["histogram"])
    assert record["acceptance_length"] == pytest.approx(record["tokens"] / record["steps"], rel=1e-5)
    for at, count in enumerate(record["histogram"]):
        assert count == sum(own["accepted"][at] for own in each if at < len(own["accepted"]))
    accepted = sum(at * count for at, count in enumerate(record["histogram"]))
    assert record["accepted_per_step"] == pytest.approx(accepted / record["steps"], rel=1e-5)
    # The bonus token of a text's last step may be missing.
    assert 0 <= record["steps"] + accepted - record["tokens"] <= record["prompts"]
    assert record["output_tokens"] == record["tokens"] + record["prompts"]
    assert record["looping"] == sum(own["looping"] for own in each)
    if record["name"] == "none":
        assert record["acceptance_length"] == 1 and record["per_depth"] == []
        assert record["speedup"] == {"median": 1, "p10": 1, "p90": 1}


def test_examples_are_texts_cut_by_origin(bench: Bench, capsys: Capture) -> None:
    assert bench("--draft", "mtp", "--shape", "4:1:5") == 0
    report = report_of(capsys.readouterr().out)
    examples = report["examples"]
    assert {example["setting"] for example in examples} == {
        "none, temperature 0, batch 1",
        "mtp 4x1, temperature 0, batch 1",
    }
    texts = {}
    for example in examples:
        texts.setdefault(example["category"], set()).add("".join(text for text, _ in example["pieces"]))
        origins = {origin for _, origin in example["pieces"]}
        assert origins == {0} if example["setting"].startswith("none") else max(origins) > 0
    assert all(len(own) == 1 for own in texts.values()) and example["prompt"] == "thelicence"


SETTINGS = ["--draft", "auto", "--shape", "4:1:5,4:4:16", "--temperature", "1", "--batch", "1,2"]


@EXHAUSTIVE
def test_two_runs_with_one_seed_give_the_same_figures(bench: Bench, capsys: Capture) -> None:
    reports = []
    for seed in ("1", "1", "2"):
        assert bench(*SETTINGS, "--limit", "1", "--seed", seed) == 0
        reports.append(report_of(capsys.readouterr().out))
    first, again, other = map(figures, reports)
    assert first == again and first != other
    assert examples(reports[0]) == examples(reports[1])


@EXHAUSTIVE
@pytest.mark.parametrize("forgets", [True, False])
def test_a_prompts_figures_hang_on_no_other(
    forgets: bool, bench: Bench, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: drafters that keep learning from batch to batch."""
    if not forgets:
        monkeypatch.setattr(Speculation, "recall", lambda *_: None)
    found = []
    for categories in ("prose", "code,edit,prose"):
        argv = ["--draft", "auto", "--shape", "4:4:16", "--temperature", "1", "--max-tokens", "90"]
        assert bench(*argv, "--warmup", "0", "--category", categories) == 0
        (record,) = (
            r
            for r in report_of(capsys.readouterr().out)["records"]
            if (r["name"], r["category"]) == ("auto 4x4:16", "prose")
        )
        found.append(record["per_prompt"])
    assert (found[0] == found[1]) == forgets


def test_an_interrupted_run_resumes_to_the_same_figures(
    bench: Bench, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if engines have to be rebuilt for each turn."""
    argv = [*SETTINGS, "--memory", "1MB"]
    assert bench(*SETTINGS) == 0
    whole = report_of(capsys.readouterr().out)
    count, right = 0, measure

    def stop(*given: Any) -> Measurement:
        nonlocal count
        count += 1
        if count == 14:
            raise KeyboardInterrupt
        return right(*given)

    monkeypatch.setattr(run, "measure", stop)
    assert bench(*argv, "--out", str(tmp_path)) == 130
    captured = capsys.readouterr()
    part = report_of(captured.out)
    assert part["interrupted"] and "INTERRUPTED" in captured.err and "Traceback" not in captured.err
    assert 0 < part["records"][0]["prompts"] < whole["records"][0]["prompts"]
    kept = tmp_path / "measurements.jsonl"
    measured = kept.read_bytes()
    kept.write_bytes(measured + b'{"key": ["half a li')
    assert bench(*argv, "--out", str(tmp_path)) == 0
    assert kept.read_bytes().startswith(measured) and b"half" not in kept.read_bytes()
    resumed = report_of(capsys.readouterr().out)
    assert figures(resumed) == figures(whole) and examples(resumed) == examples(whole)
    assert not resumed["interrupted"]


def test_results_of_another_run_are_refused_naming_the_difference(
    bench: Bench, capsys: Capture, tmp_path: Path
) -> None:
    assert bench("--draft", "suffix", "--out", str(tmp_path)) == 0
    assert bench("--draft", "suffix", "--seed", "3", "--out", str(tmp_path)) == 2
    assert "measurements with another --seed (0, not 3)" in capsys.readouterr().err
    for content in ("not ours\n", '"text"\n', "5\n", '{"model": 1}\n'):
        (tmp_path / "measurements.jsonl").write_text(content)
        assert bench("--draft", "suffix", "--out", str(tmp_path)) == 2
        assert "--out" in capsys.readouterr().err


def test_a_wrong_text_withholds_every_figure(
    bench: Bench, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = measure

    def wrong(model: LoadedModel, batch: Sequence[TokenizedPrompt], params: Any) -> Measurement:
        found = right(model, batch, params)
        if not model.settings.drafters:
            return found
        fields = found.as_json()
        ids = fields["answers"][0]["token_ids"]
        fields["answers"][0]["token_ids"] = (*ids[:5], (ids[5] + 1) % 63, *ids[6:])
        return Measurement.of(json.loads(json.dumps(fields)))

    monkeypatch.setattr(run, "measure", wrong)
    assert bench("--draft", "suffix") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "suffix 4x1" in captured.err and "no figure is shown" in captured.err
    # Near ties, and differences in low precision, are counted and shown.
    with monkeypatch.context() as patched:
        patched.setattr(agreement, "EXCUSED_GAP", 10.0)
        assert bench("--draft", "suffix") == 0
        assert "differing texts (near ties): suffix 4x1 5" in capsys.readouterr().err
    assert bench("--draft", "suffix", "--dtype", "bfloat16") == 0
    captured = capsys.readouterr()
    assert "differing texts (bfloat16 rounds" in captured.err
    assert {r["differing_texts"] for r in report_of(captured.out)["records"] if r["category"] == "all"} >= {
        0,
        5,
    }


def test_a_text_that_only_ends_elsewhere_is_wrong(agreeing: Path) -> None:
    engines = EngineCache(agreeing, EngineConfig(max_model_len=64, dtype="float32"), [], None)
    asked, length, group = (
        TokenizedPrompt("code", "a", (5, 6)),
        AnswerLength(12, ignore_eos=True),
        SettingGroup(0.0, 1),
    )
    params = params_for(asked, group, length, 0)
    (answer,) = measure(engines.open(Drafting("none")), [asked], [params]).answers
    shorter = Measurement.of({"answers": [], "seconds": 1, "reading_s": 0, "phases": {}, "timed": 0})
    assert shorter.answers == ()
    fields = {**measure(engines.open(Drafting("none")), [asked], [params]).as_json()["answers"][0]}
    cut = type(answer).of({**fields, "token_ids": answer.token_ids[:-1]})
    model = engines.open(Drafting("none"))
    with pytest.raises(agreement.EngineError, match="no figure is shown"):
        agreement.require_rounding(model, asked.ids, params, answer.token_ids, cut.token_ids, "cut")
    engines.open(Drafting("none")).loop.arena.check_integrity()


def test_engines_share_weights_and_give_way(agreeing: Path) -> None:
    config = EngineConfig(max_model_len=64, max_running=2)
    wide = EngineCache(agreeing, config, [CHAIN, TREE, Drafting("suffix", DraftShape(4, 1, 5))], None)
    opened = [wide.open(own) for own in (Drafting("none"), *wide.draftings)]
    assert len({id(model.network) for model in opened}) == 1
    assert [model.settings.drafters for model in opened] == [(), ("mtp",), ("mtp",), ("suffix",)]
    assert wide.open(CHAIN) is opened[1]
    narrow = EngineCache(agreeing, config, [CHAIN, TREE], 1)
    first = narrow.open(CHAIN)
    assert narrow.most == 1 and narrow.open(TREE) is not first and narrow.open(CHAIN) is not first


def test_a_quantised_copy_drafts_for_its_model(bench: Bench, agreeing: Path, capsys: Capture) -> None:
    asked = [CHAIN, Drafting("self-int4", DraftShape(3, 1, 4)), Drafting("self-int4", DraftShape(2, 1, 3))]
    engines = EngineCache(agreeing, EngineConfig(max_model_len=64, max_running=2), asked, None)
    head, *copied = (engines.open(drafting) for drafting in engines.draftings)
    assert head.network is not copied[0].network and copied[0].network is copied[1].network
    drafters = [own.loop.speculation.planned for own in copied]
    assert isinstance(drafters[0], RoundedDrafter) and isinstance(drafters[1], RoundedDrafter)
    assert drafters[0].copy is drafters[1].copy is not copied[0].network
    assert bench("--draft", "self-int4", "--shape", "3:1:4", "--draft-window", "0,16", "--limit", "1") == 0
    report = report_of(capsys.readouterr().out)
    assert {r["name"] for r in report["records"]} == {"none", "self-int4 3x1"}
    (why,) = report["left_out"]
    assert why.endswith("only a head has a use for a window")


def test_economies_have_a_head_of_their_own(agreeing: Path, tmp_path: Path) -> None:
    folder = tmp_path / "counted"
    shutil.copytree(agreeing, folder)
    (folder / "token_counts.json").write_text('{"counts": [9, 8, 7, 6]}')
    short, near = replace(CHAIN, vocab=4), replace(CHAIN, vocab=4, window=16)
    engines = EngineCache(folder, EngineConfig(max_model_len=64, max_running=2), [CHAIN, short, near], None)
    whole, spared, close = (engines.open(own) for own in (CHAIN, short, near))
    assert whole.network.shortlist is None and spared.network.shortlist is not None
    assert spared.network is close.network and spared.network.shortlist.ids_C is not None
    assert spared.network.shortlist.ids_C.tolist() == [0, 1, 2, 3]
    heads = [own.loop.speculation.head for own in (whole, spared, close)]
    assert [head and head.window for head in heads] == [None, None, 16]


def test_economies_are_measured_with_a_head_alone(bench: Bench, capsys: Capture) -> None:
    """Also without token counts."""
    economies = ["--draft-vocab", "0,4", "--draft-window", "0,16"]
    assert bench("--draft", "mtp,suffix", "--shape", "2:1:3", *economies, "--limit", "1") == 0
    report = report_of(capsys.readouterr().out)
    heads = {f"mtp 2x1{only}{near}" for only in ("", " vocab 4") for near in ("", " window 16")}
    assert {r["name"] for r in report["records"]} == {"none", "suffix 2x1", *heads}
    assert not report["left_out"]


def test_settings_refused_by_an_engine_are_skipped_and_named(
    bench: Bench, capsys: Capture, agreeing: Path
) -> None:
    (agreeing / "token_counts.json").write_text("[]")
    try:
        assert bench("--draft", "mtp", "--shape", "2:1:3", "--draft-vocab", "0,4", "--limit", "1") == 0
    finally:
        (agreeing / "token_counts.json").unlink()
    report = report_of(capsys.readouterr().out)
    assert {r["name"] for r in report["records"]} == {"none", "mtp 2x1"}
    (why,) = report["left_out"]
    assert why.startswith("mtp of 4 tokens: draft_vocab") and "token_counts.json" in why


def test_settings_take_turns_in_rotated_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, ...]] = []
    right = measure

    def watch(model: LoadedModel, batch: Sequence[TokenizedPrompt], params: Any) -> Measurement:
        order.append((batch[0].name, *model.settings.drafters))
        return right(model, batch, params)

    monkeypatch.setattr(run, "measure", watch)
    assert bench("--draft", "mtp,suffix", "--shape", "4:1:5", "--warmup", "0") == 0
    # Each starts with an uncounted prompt, even if it learns nothing from it.
    counted = [own for own, before in zip(order, [None, *order], strict=False) if own != before]
    assert len(order) == len(counted) + 3
    assert [own[1:] for own in counted] == [
        *((), ("mtp",), ("suffix",)),
        *(("mtp",), ("suffix",), ()),
        *(("suffix",), (), ("mtp",)),
        *((), ("mtp",), ("suffix",)),
        *(("mtp",), ("suffix",), ()),
    ]
    assert [own[0] for own in counted[::3]] == ["code 0", "edit 0", "prose 0", "code 1", "edit 1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--shape", "4:1"], "'4:1' is no shape; write STEPS:TOPK:TOKENS"),
        (["--shape", "4:1:5", "--topk", "2"], "--topk: --shape says it already"),
        (["--draft", "oracle"], "'oracle' is not one of auto, mtp, eagle"),
        (["--temperature", "hot"], "'hot' is no temperature"),
        (["--max-tokens", "400"], "none fits the model's 256 tokens"),
        (["--memory", "much"], "memory_bytes cannot be 'much'"),
        (["--out", "{prompts}"], "is a file; name a folder"),
        (["--category", "songs"], "'songs'"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], says: str, bench: Bench, prompts: Path, capsys: Capture
) -> None:
    try:
        code = bench(*(part.format(prompts=prompts) for part in argv))
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and says in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("token", [VOCAB, 2_000_000_000, 10**20])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(
    agreeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], token: int
) -> None:
    """Nothing below would: an embedding is read at any address an id gives."""
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [1, token, 5]}))
    assert main(["bench", "acceptance", str(agreeing), "--prompts", str(file), *QUICK]) == 2
    said = capsys.readouterr().err
    assert f"--prompts: line 1 has token id {token}, outside" in said
