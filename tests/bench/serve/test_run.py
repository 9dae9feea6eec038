import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import cli
from tests.bench.serve.servers import TOKENS, FakeServer, serving

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Return a function that runs the command and returns its report and its stderr."""

    def bench(server: FakeServer, *options: str, code: int = 0) -> dict[str, Any]:
        assert cli.main(["bench", "serve", server.url, "--json", *options]) == code
        captured = capsys.readouterr()
        return {**json.loads(captured.out), "shown": captured.err}

    return bench


def test_vllm_is_counted_by_usage_and_its_counters(bench: Bench) -> None:
    with serving(FakeServer("vllm")) as server:
        report = bench(server, "--concurrency", "1,3", "--requests", "5", "--max-tokens", "9", "--seed", "4")
    assert report["benchmark"] == "serve"
    assert (report["model"], report["endpoint"], report["interrupted"]) == (
        "vllm-model",
        "completions",
        False,
    )
    assert report["prompts"]["categories"] == {"code": 64, "edit": 64, "prose": 64, "mixed": 64}
    assert server.most_in_flight == 3
    for level in report["levels"]:
        assert (level["completed"], level["failed"], level["requests"]) == (5, 0, 5)
        assert level["counted_by"] == {"usage": 5}
        assert level["output_tokens"] == 5 * TOKENS
        assert level["tokens_per_chunk"] == pytest.approx(TOKENS / 3, rel=1e-5)
        assert level["speculation"]["source"] == "the server's counters"
        assert level["speculation"]["acceptance_length"] == 1 + 6 / 4
        assert (level["speculation"]["drafted"], level["speculation"]["accepted"]) == (5 * 12, 5 * 6)
        assert level["speculation"]["per_depth"] == pytest.approx([3 / 4, 2 / 3, 1 / 2], rel=1e-5)
        times = [level[name] for name in ("ttft_s", "inter_token_s", "chunk_gap_s", "end_to_end_s")]
        assert all(0 < x["median"] <= x["p90"] <= x["p99"] for x in times)
        assert level["ttft_s"]["p99"] < level["end_to_end_s"]["p99"]
    assert "acceptance length 2.50 by the server's counters; 30 of 60" in report["shown"]
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("vllm-model", 9, 0)
        assert body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body
    # Every request, warm-up included, has its own prompt and seed.
    assert len(server.bodies) == 1 + 5 + 3 + 5
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies)
    assert {body["seed"] for body in server.bodies} == set(range(4, 4 + 14))


def test_sglang_shows_a_gauge(bench: Bench) -> None:
    with serving(FakeServer("sglang")) as server:
        (level,) = bench(server, "--concurrency", "2", "--requests", "3")["levels"]
    assert level["counted_by"] == {"usage": 3}
    assert level["speculation"]["acceptance_length"] == 2.75
    assert level["speculation"]["drafted"] is None
    assert "gauge" in level["speculation"]["source"]


def test_llama_cpp_tells_in_its_streams(bench: Bench) -> None:
    with serving(FakeServer("llama.cpp")) as server:
        (level,) = bench(server, "--concurrency", "2", "--requests", "12")["levels"]
    assert level["counted_by"] == {"timings": 12}
    assert level["speculation"]["source"] == "the streams of 12 requests"
    assert level["speculation"]["acceptance_length"] == pytest.approx(TOKENS / (TOKENS - 4), rel=1e-5)


def test_without_usage_the_chunks_are_counted_and_the_report_says_so(bench: Bench) -> None:
    with serving(FakeServer("bare")) as server:
        report = bench(server, "--concurrency", "1", "--requests", "3")
    (level,) = report["levels"]
    assert (level["output_tokens"], level["counted_by"], level["speculation"]) == (9, {"chunks": 3}, None)
    assert "TOKENS ARE COUNTED AS CHUNKS in 3 requests" in report["shown"]
    assert "not reported" in report["shown"]
    # One request found that the server refuses the option.
    assert sum("stream_options" in body for body in server.bodies) == 1


def test_chat_sends_messages_and_does_not_count_its_opening(bench: Bench, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}
    chats.write_text(f"{json.dumps({'messages': [system, user]})}\n" + '{"prompt": "plain"}\n', "utf-8")
    with serving(FakeServer("vllm")) as server:
        few = ("--concurrency", "1", "--requests", "2", "--warmup", "0", "--prompts", str(chats))
        report = bench(server, "--chat", *few)
        assert report["levels"][0]["tokens_per_chunk"] == pytest.approx(TOKENS / 3, rel=1e-5)
        sent = [body["messages"] for body in server.bodies]
        assert sorted(sent, key=len) == [[{"role": "user", "content": "plain"}], [system, user]]
        plain = bench(server, *few)
    assert {body["prompt"] for body in server.bodies[2:]} == {"Hi", "plain"}
    assert plain["prompts"]["chats_as_text"] == 1
    assert "with --chat the server applies its template" in plain["shown"]


FAULTS = {
    "busy": "HTTP 503: too busy",
    "locked": "HTTP 401: no such key; --api-key-env names the variable that holds its key: check both",
    "die": "the connection broke in mid-stream",
    "error event": "error in the stream: the engine is dead",
    "noise": "an event is no JSON: <html>",
    "cut": "the stream ended before its finish reason",
    "plain": 'it answered without streaming: {"choices": [{"text": "all at once"}]}',
    "hang": "it took too long",
}


def test_failures_are_counted_by_reason_and_the_run_continues(bench: Bench) -> None:
    faults = dict(enumerate([*FAULTS, "no done"], 1))
    with serving(FakeServer("vllm", faults=faults)) as server:
        options = ("--concurrency", "1", "--requests", "11", "--warmup", "1", "--timeout", "1")
        report = bench(server, *options)
    (level,) = report["levels"]
    assert level["failures"] == dict.fromkeys(FAULTS.values(), 1)
    assert (level["completed"], level["failed"]) == (3, 8)
    assert level["output_tokens"] == 3 * TOKENS
    assert "concurrency 1: 1 failed: HTTP 503: too busy" in report["shown"]


def test_server_that_completes_nothing_is_an_error_after_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(FakeServer("vllm", faults=dict.fromkeys(range(9), "die"))) as server:
        assert cli.main(["bench", "serve", server.url, "--concurrency", "1", "--requests", "2"]) == 2
        warmed = capsys.readouterr()
        command = [
            "bench",
            "serve",
            server.url,
            "--concurrency",
            "2",
            "--requests",
            "3",
            "--warmup",
            "0",
            "--json",
        ]
        assert cli.main(command) == 2
    assert warmed.out == ""
    assert "completed none of 1 requests to warm it up (the connection broke" in warmed.err
    measured = capsys.readouterr()
    assert json.loads(measured.out)["levels"][0]["failed"] == 3
    assert "completed no request" in measured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["http://127.0.0.1:1"],
            "url: the server at http://127.0.0.1:1 did not return .*nothing answers there",
        ),
        (
            ["http://127.0.0.1:1", "--model", "m", "--concurrency", "1"],
            "none of 1 requests .*nothing answers there",
        ),
        (["local host:8000"], "url: 'local host:8000' is not the address of a server"),
        (["http://h", "--api-key-env", "NO_SUCH_VARIABLE"], "--api-key-env: no variable 'NO_SUCH_VARIABLE'"),
        (["http://h", "--prompts", "absent.jsonl"], "--prompts: absent.jsonl cannot be read"),
        (["http://h", "--category", "poems"], "--category: 'poems' is none"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1

    assert re.search(message, err)


@pytest.mark.parametrize("option", ["--rate=0", "--timeout=nan", "--temperature=-1", "--rate=soon"])
def test_numbers_that_make_no_sense_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "http://h", option]) == 2
    assert option.split("=")[0] in capsys.readouterr().err


def test_token_ids_are_sent_as_such_and_are_no_chat(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt": [5, 6]}\n')
    with serving(FakeServer("vllm")) as server:
        few = (
            "--prompts",
            str(path),
            "--concurrency",
            "1",
            "--requests",
            "2",
            "--warmup",
            "0",
            "--ignore-eos",
        )
        report = bench(server, *few)
        assert cli.main(["bench", "serve", server.url, *few, "--chat"]) == 2
    assert [body["prompt"] for body in server.bodies] == [[5, 6]] * 2
    assert all(body["ignore_eos"] for body in server.bodies)
    assert report["levels"][0]["repeated_prompts"] == 1
    assert "1 prompts were sent before, each with a new cache_salt" in report["shown"]
    assert "is token ids, and a chat takes text" in capsys.readouterr().err


def test_a_repeated_prompt_gets_a_new_salt(bench: Bench, tmp_path: Path) -> None:
    """Two of the three prompts are equal, at different positions in the file."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(f'{{"prompt": "{text}", "id": {i}}}\n' for i, text in enumerate("aba")), "utf-8")
    few = ("--prompts", str(path), "--concurrency", "1,2", "--requests", "4", "--warmup", "1")
    with serving(FakeServer("vllm")) as server:
        report = bench(server, *few)
        bench(server, *few)
    sent = [(body["prompt"], body["cache_salt"]) for body in server.bodies]
    assert len(sent) == len(set(sent)) == 20, "no prompt has a salt twice"
    assert {salt for text, salt in sent if text == "a"} & {salt for text, salt in sent if text == "b"}
    assert report["takes_salts"] and report["levels"][1]["repeated_prompts"] == 4


def test_a_server_that_refuses_salts_gets_none_and_the_report_says_so(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("once", "utf-8")
    few = ("--prompts", str(path), "--concurrency", "1", "--requests", "3", "--warmup", "0")
    with serving(FakeServer("strict")) as server:
        report = bench(server, *few)
    assert ["cache_salt" in body for body in server.bodies] == [True, False, False, False]
    assert (report["levels"][0]["completed"], report["takes_salts"]) == (3, False)
    assert "2 prompts were sent before; THE SERVER REFUSES cache_salt" in report["shown"]


def test_key_comes_from_the_environment_and_is_not_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_KEY", "sesame")
    with serving(FakeServer("vllm")) as server:
        report = bench(server, "--api-key-env", "SERVE_KEY", "--concurrency", "1", "--requests", "1")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sesame"}
    assert "sesame" not in json.dumps(report)


def test_report_is_written_to_a_file_too(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    with serving(FakeServer("vllm")) as server:
        report = bench(server, "--concurrency", "1", "--requests", "1", "--rate", "50", "--out", str(out))
    assert json.loads(out.read_text())["levels"] == report["levels"]
    assert "Poisson arrivals, 50 per second" in report["shown"]


def test_ctrl_c_shows_what_there_is() -> None:
    hang = dict.fromkeys(range(4, 99), "hang")
    with serving(FakeServer("vllm", faults=hang)) as server:
        command = [
            sys.executable,
            "-m",
            "specdec",
            "bench",
            "serve",
            server.url,
            "--json",
            "--concurrency",
            "2",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(server.bodies) < 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads(out)
    assert report["interrupted"]
    assert "INTERRUPTED" in err
    assert (report["levels"][0]["completed"], report["levels"][0]["failed"]) == (2, 0)
