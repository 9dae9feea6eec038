"""The server's HTTP answers match the engine's, in the formats of OpenAI's API."""

from collections.abc import Iterator
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine, __version__
from tests.server.live import Live, serving, total
from tests.tolerances import LOGITS_RELATIVE

PROMPT = "import os\n\n\ndef "
CHAT, ASKED = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--dtype", "float32")  # window widths do not change texts by rounding


@pytest.fixture(scope="module")
def engine() -> Iterator[SpecEngine]:
    with SpecEngine("tiny", dtype="float32") as own:
        yield own


def texts(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}], ids=str
)
def test_a_completion_is_the_engines(
    live: Live, engine: SpecEngine, stream: bool, fields: dict[str, Any]
) -> None:
    wanted = engine.generate(PROMPT, SamplingParams(max_tokens=40, **fields))[0]
    answer = live.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "stream": stream, **fields})
    assert answer.status == 200
    if stream:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert texts(answer.events) == wanted.text
        reasons = [choice["finish_reason"] for event in answer.events for choice in event["choices"]]
        assert reasons[-1] == wanted.finish_reason and not any(reasons[:-1])
        return
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, wanted.finish_reason)
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == len(wanted.prompt_token_ids)
    assert usage["completion_tokens"] == len(wanted.token_ids)
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 <= accepted < usage["completion_tokens"]


def test_the_four_forms_of_a_prompt(live: Live, engine: SpecEngine) -> None:
    assert engine.tokenizer
    ids = engine.tokenizer.encode(PROMPT)
    answers = [
        live.ask("/v1/completions", SHORT | {"prompt": prompt}).json["choices"]
        for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids, ids])
    ]
    first = answers[0][0]["text"]
    assert [[choice["text"] for choice in choices] for choices in answers] == [
        [first],
        [first],
        [first] * 2,
        [first] * 2,
    ]
    assert [choice["index"] for choice in answers[2]] == [0, 1]


def test_choices_have_separate_seeds(live: Live, engine: SpecEngine) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3}
    wanted = [own.text for own in engine.generate(PROMPT, SamplingParams(**fields))]
    whole = live.ask("/v1/completions", {"prompt": [PROMPT, "class"], **fields}).json["choices"]
    assert [choice["index"] for choice in whole] == list(range(6))
    assert [choice["text"] for choice in whole[:3]] == wanted
    events = live.ask("/v1/completions", {"prompt": PROMPT, "stream": True, **fields}).events
    by_choice = [
        "".join(c["text"] for e in events for c in e["choices"] if c["index"] == i) for i in range(3)
    ]
    assert by_choice == wanted


def test_a_chat_begins_with_its_role_and_ends_once(live: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}],
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = live.ask("/v1/chat/completions", body).json
    assert whole["object"] == "chat.completion" and whole["choices"][0]["message"]["role"] == "assistant"
    events = live.ask(
        "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    ).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    *said, last = events
    assert last["choices"] == []
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][count] == whole["usage"][count]
    assert all(event["usage"] is None for event in said)
    content = "".join(event["choices"][0]["delta"].get("content", "") for event in said)
    assert content == whole["choices"][0]["message"]["content"]
    reasons = [event["choices"][0]["finish_reason"] for event in said]
    assert reasons[-1] == "length" and not any(reasons[:-1])


def test_usage_is_sent_on_request(live: Live) -> None:
    options = {"continuous_usage_stats": True}
    alone = live.ask("/v1/completions", SHORT | {"stream": True, "stream_options": options}).events
    assert not any("usage" in event for event in alone)  # as in vLLM, both options are needed
    options["include_usage"] = True
    events = live.ask("/v1/completions", SHORT | {"stream": True, "stream_options": options}).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12


def test_log_probabilities_in_both_forms(live: Live, engine: SpecEngine) -> None:
    assert engine.tokenizer
    wanted = engine.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, logprobs=2))[0]
    assert wanted.logprobs
    own = live.ask("/v1/completions", SHORT | {"logprobs": 2}).json["choices"][0]
    columns = own["logprobs"]
    assert "".join(columns["tokens"]) == own["text"] == wanted.text
    assert columns["token_logprobs"] == pytest.approx(
        [logprob.logprob for logprob in wanted.logprobs], rel=LOGITS_RELATIVE
    )
    starts = [len("".join(columns["tokens"][:i])) for i in range(12)]
    assert columns["text_offset"] == starts
    assert all(2 <= len(top) <= 3 for top in columns["top_logprobs"])
    streamed = live.ask("/v1/completions", SHORT | {"logprobs": 2, "stream": True}).events
    assert [t for e in streamed for t in e["choices"][0]["logprobs"]["tokens"]] == columns["tokens"]
    assert [o for e in streamed for o in e["choices"][0]["logprobs"]["text_offset"]] == starts
    chat = {
        "messages": [{"role": "user", "content": "def"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    content = live.ask("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(len(each["top_logprobs"]) == 2 for each in content)
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in content)


def test_accepted_drafts_are_reported_and_counted(live: Live) -> None:
    before = live.metrics()
    body = SHORT | {
        "max_tokens": 60,
        "return_metrics": True,
        "return_origins": True,
        "return_token_ids": True,
    }
    answer = live.ask("/v1/completions", body).json
    after, earned = live.metrics(), answer["metrics"]["speculative_decoding"]

    def gained(name: str) -> float:
        return total(after, name) - total(before, name)

    choice = answer["choices"][0]
    assert len(choice["origins"]) == len(choice["token_ids"]) == 60
    assert "".join(text for text, _ in choice["pieces"]) == choice["text"]
    accepted = sum(origin > 0 for origin in choice["origins"])
    assert accepted == answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert gained("vllm:spec_decode_num_accepted_tokens_total") == accepted == earned["accepted_tokens"]
    assert gained("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert gained("vllm:spec_decode_num_draft_tokens_total") == earned["drafted_tokens"]
    assert gained("vllm:generation_tokens_total") == 60
    assert gained("vllm:request_success_total") == gained("vllm:time_to_first_token_seconds_count") == 1
    assert gained("vllm:inter_token_latency_seconds_count") == 59


def test_texts_become_tokens_and_back(live: Live, engine: SpecEngine) -> None:
    assert engine.tokenizer
    found = live.ask("/tokenize", {"prompt": PROMPT}).json
    assert found["tokens"] == engine.tokenizer.encode(PROMPT) and found["count"] == len(found["tokens"])
    assert live.ask("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": PROMPT}
    chat = live.ask("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert chat["count"] > 1


def test_served_models_are_listed(live: Live) -> None:
    (card,) = live.ask("/v1/models").json["data"]
    assert card["id"] == "tiny" and card["max_model_len"] > 100
    assert live.ask("/v1/models/tiny").json == card
    assert live.ask("/v1/models/other").status == 404
    assert live.ask("/health").status == live.ask("/ready").status == 200
    info = live.ask("/server_info").json
    assert info["model"] == "tiny" and info["max_model_len"] == card["max_model_len"]
    assert info["writes"] == "completions"  # although it has a chat template


def test_a_request_keeps_its_id(live: Live) -> None:
    assert live.ask("/v1/models", X_Request_ID="mine-1").headers["X-Request-ID"] == "mine-1"
    answer = live.ask("/v1/completions", SHORT | {"stream": True}, X_Request_ID="mine-2")
    assert answer.headers["X-Request-ID"] == "mine-2"
    assert live.ask("/v1/nowhere", X_Request_ID="bad id").headers["X-Request-ID"] not in (
        "",
        "bad id",
    )


MANY = {"n": 128, "max_tokens": 9999}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": PROMPT, "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": PROMPT, "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": PROMPT, "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1 << 40]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x " * 100_000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "prompt"),
        ("/v1/completions", {"prompt": [PROMPT] * 300}, 400, "prompt"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": PROMPT, "suffix": "end"}, 400, "suffix"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 99}, 400, "logprobs"),
        ("/v1/completions", {"prompt": PROMPT, "n": 129}, 400, "n"),
        ("/v1/completions", {"prompt": PROMPT, "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 20} | MANY, 400, "max_tokens"),
        (CHAT, ASKED | {"logprobs": True, "top_logprobs": 20} | MANY, 400, "max_tokens"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, ASKED | {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, ASKED | {"tools": [{"type": "function"}]}, 400, "tools"),
        (
            CHAT,
            ASKED | {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            400,
            "tools",
        ),
        (CHAT, ASKED | {"tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/completions", {"prompt": PROMPT, "keep_alive": True}, 400, "keep_alive"),
        ("/v1/completions", {"prompt": PROMPT, "keep_alive": -2}, 400, "keep_alive"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(live: Live, path: str, body: Any, status: int, param: str) -> None:
    answer = live.ask(path, body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert param in answer.error["message"] and "Traceback" not in answer.error["message"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"null", b"1", b'{"prompt": NaN}', b"[" * 100_000]
)
def test_a_body_that_is_none_is_refused(live: Live, data: bytes) -> None:
    answer = live.ask("/v1/completions", data=data, method="POST")
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"


def test_nulls_count_as_not_given(live: Live) -> None:
    nulls = dict.fromkeys(
        ("stop", "n", "seed", "logprobs", "logit_bias", "suffix", "stream_options", "tools", "user")
    )
    assert (
        live.ask("/v1/completions", SHORT | nulls).json["choices"]
        == live.ask("/v1/completions", SHORT).json["choices"]
    )


def test_the_description_has_every_address_and_field(live: Live) -> None:
    found = live.ask("/openapi.json").json
    assert found["openapi"].startswith("3.1")
    made = live.ask("/v1/responses", {"input": "a", "max_output_tokens": 1}).json["id"]
    for path, own in found["paths"].items():
        name = made if "responses" in path else "tiny"
        for method in own:
            body = {} if method == "post" else None
            status = live.ask(path.replace("{name}", name), body, method=method.upper()).status
            assert status == (400 if "requestBody" in own[method] else 200), path
    schemas = found["components"]["schemas"]
    assert {"prompt", "top_k", "stream_options", "return_origins"} <= set(
        schemas["CompletionBody"]["properties"]
    )
    assert {"messages", "max_completion_tokens", "seed"} <= set(schemas["ChatBody"]["properties"])


def test_the_version_and_the_page_of_the_description(live: Live) -> None:
    assert live.ask("/version").json == {"version": __version__}
    page = live.ask("/docs")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    text = page.data.decode()
    assert all(f"<code>{path}</code>" in text for path in live.ask("/openapi.json").json["paths"])


def test_unknown_addresses_and_methods(live: Live) -> None:
    assert live.ask("/v1/nowhere").status == 404
    for path, says in (
        ("/models", "did you mean /v1/models? The base URL of OpenAI's clients ends with /v1."),
        ("/completion", "did you mean /v1/completions? The base URL of OpenAI's clients ends with /v1."),
        ("/v1/chat/completion", "mean /v1/chat/completions? The base URL of OpenAI's clients ends with /v1."),
        (
            "/v1/v1/messages",
            "mean /v1/messages? The base URL of Anthropic's clients is without /v1.",
        ),
    ):
        is_anthropic = path.endswith("messages")
        missed = live.ask(path, **{"anthropic-version": "2023-06-01"} if is_anthropic else {})
        assert missed.status == 404 and missed.json["error"]["message"].endswith(says)
        assert missed.json.get("type") == ("error" if is_anthropic else None)
    answer = live.ask("/v1/completions")
    assert answer.status == 405 and answer.headers["Allow"] == "POST"
    assert answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_prompts_tokens_go_where_its_answers_do(live: Live, path: str) -> None:
    asked = {"prompt": PROMPT} if path != CHAT else ASKED
    body = {**asked, "max_tokens": 4, "seed": 1, "n": 2, "return_token_ids": True}
    whole = live.ask(path, body).json
    ids = whole["choices"][0]["prompt_token_ids"]
    assert len(ids) == whole["usage"]["prompt_tokens"]
    firsts: dict[int, Any] = {}
    for event in live.ask(path, body | {"stream": True}).events:
        for choice in event["choices"]:
            assert ("prompt_token_ids" in choice) == (choice["index"] not in firsts)
            firsts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert firsts == {0: ids, 1: ids}


def test_memory_is_shown_by_kind(live: Live) -> None:
    found = live.metrics()
    named = {key for key in found if key.startswith("specdec:arena_bytes{")}
    kinds = ("kv", "state", "draft", "prefix", "free")
    assert len(named) == 5 and all(any(f'"{kind}"' in key for key in named) for kind in kinds)
    assert total(found, "specdec:arena_bytes") > 0


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_requests_answer_like_get(live: Live, path: str) -> None:
    whole, head = live.ask(path), live.ask(path, method="HEAD")
    assert (head.status, head.data) == (whole.status, b"") and whole.data
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]


@pytest.mark.parametrize("count", [10**400, 10**23, 2**31 + 1])
def test_a_huge_max_tokens_is_refused(live: Live, count: int) -> None:
    answer = live.ask("/v1/completions", SHORT | {"max_tokens": count})
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")


def test_a_body_with_a_wrong_content_encoding_is_refused(live: Live) -> None:
    answer = live.ask("/v1/completions", data=b"nonsense", Content_Encoding="gzip")
    assert answer.status == 400 and "Content-Encoding" in answer.error["message"]


def test_nulls_within_options_count_as_not_given(live: Live) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    events = live.ask("/v1/completions", SHORT | {"stream": True, "stream_options": options}).events
    assert events and not any("usage" in event for event in events)


def test_a_prompt_that_is_too_long_has_openais_code(live: Live) -> None:
    answer = live.ask("/v1/completions", SHORT | {"prompt": [1] * 5000})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
