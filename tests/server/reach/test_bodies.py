"""Request fields for disaggregation: the role that they imply, and which are refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.reach.protocol import LeaseReference
from specdec.server.bodies import ChatBody, CompletionBody, RequestBody
from specdec.server.failures import Failure
from specdec.server.reach.bodies import MOST_ROOM, BootstrapFields, FetchFields, LendFields
from specdec.server.reach.lending import lending_params
from specdec.server.reach.reach import covered, references_of
from tests.server.reach.proxies import PROXIES, Proxy, sglang

PROMPT: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
KINDS: tuple[tuple[type[RequestBody], dict[str, Any]], ...] = ((CompletionBody, PROMPT), (ChatBody, CHAT))
SAMPLING: dict[str, Any] = {
    "n": 2,
    "min_tokens": 3,
    "max_tokens": 9,
    "temperature": 0.5,
    "seed": 1,
    "stop": ".",
}
LEASE = {"lease": "1" * 32, "mac": "2" * 64}
CACHED: dict[str, Any] = {"do_remote_decode": True, "specdec": {"v": 1, "cached_only": True}}
TOLD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "0" * 32,
    "remote_request_id": "1" * 32,
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [],
    "tp_size": 1,
    "remote_num_tokens": 4,
    "transfer_mode": "pull",
    "specdec": {"v": 1, "leases": [LEASE], "expires_in": 30.0},
}


def read(kind: type[RequestBody], fields: dict[str, Any]) -> Any:
    return kind.read(json.dumps(fields).encode())


def refusal(fields: dict[str, Any], role: Any = "both", prompts: int = 1) -> Failure:
    with pytest.raises(Failure) as caught:
        read(CompletionBody, PROMPT | fields).asked(role, prompts)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("kind", "least"), KINDS)
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda own: own.name)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_rewritten_by_proxies_are_accepted(
    kind: type[RequestBody], least: dict[str, Any], proxy: Proxy, stream: bool
) -> None:
    """Proxies produce min_tokens 3 with max_tokens 1, n of 2, and stream_options without stream."""
    client = (
        least | SAMPLING | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    )
    first = read(kind, proxy.to_prefill(client))
    assert first.asked("both") == first.asked("prefill") == LendFields(None)
    params = lending_params(first)
    assert (params.n, params.max_tokens, params.min_tokens, params.stop) == (1, 1, 0, None)
    second = read(kind, proxy.to_decode(client, {"kv_transfer_params": TOLD}))
    asked = second.asked("both")
    assert isinstance(asked, FetchFields) and asked == second.asked("decode")
    assert asked.params and asked.params.specdec and asked.params.specdec.leases[0]
    assert asked.params.specdec.leases[0].mac == "2" * 64
    assert second.params({}).n == 2


@pytest.mark.parametrize(("kind", "least"), KINDS)
def test_sglangs_fields_follow_the_servers_role(kind: type[RequestBody], least: dict[str, Any]) -> None:
    fields = sglang(least | SAMPLING, "127.0.0.1", 5600, MOST_ROOM)
    assert read(kind, fields).asked("prefill") == LendFields((MOST_ROOM,))
    assert read(kind, fields).asked("decode") == FetchFields(
        None, (BootstrapFields("127.0.0.1", 5600, MOST_ROOM),)
    )


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_a_cached_prefix_may_be_lent_alone(role: Any) -> None:
    assert read(CompletionBody, PROMPT | {"kv_transfer_params": CACHED}).asked(role) == LendFields(
        None, cached_only=True
    )


def test_a_prompt_may_be_fetched_in_part_before_it_is_lent() -> None:
    fields = TOLD | {"do_remote_decode": True, "specdec": {"v": 1, "leases": [LEASE | {"tokens": 9}, None]}}
    asked = read(CompletionBody, PROMPT | {"kv_transfer_params": fields}).asked("both")
    assert isinstance(asked, LendFields) and asked.fetch and not asked.cached_only
    (reference, nothing) = references_of(asked.fetch, 2)
    assert nothing is None
    assert reference == LeaseReference("127.0.0.1", 5600, "0" * 32, "1" * 32, "2" * 64, 9)
    assert list(covered(range(20), reference)) == list(range(10)), "and the one behind them, which is read"
    assert list(covered(range(5), reference)) == list(range(5)), "which has another hash"


LEASES = st.lists(
    st.none()
    | st.fixed_dictionaries(
        {name: st.just(value) for name, value in LEASE.items()},
        optional={"tokens": st.integers(-2, 1 << 70) | st.text(max_size=2)},
    ),
    max_size=3,
)
SAYS = st.none() | st.fixed_dictionaries(
    {"v": st.integers(0, 2)},
    optional={"leases": st.none() | LEASES, "cached_only": st.none() | st.booleans() | st.integers(0, 1)},
)


@given(
    flags=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("do_remote_decode", "do_remote_prefill"), st.none() | st.booleans())
    ),
    says=SAYS,
    role=st.sampled_from(["prefill", "decode", "both"]),
)
def test_every_field_is_honoured_or_refused_by_name(flags: dict[str, Any], says: Any, role: Any) -> None:
    fields = {"kv_transfer_params": {**TOLD, **flags, "specdec": says}}
    refused = None
    try:
        asked = read(CompletionBody, PROMPT | fields).asked(role)
    except Failure as failure:
        refused, asked = failure, None
    assert refused is None or (refused.status, str(refused)[:19]) == (400, "kv_transfer_params.")
    fetch = asked.fetch if isinstance(asked, LendFields) else asked
    assert not (isinstance(asked, LendFields) and role == "decode") and not (fetch and role == "prefill")
    for reference in references_of(fetch, 1) if fetch else ():
        assert 1 < len(covered(range(20), reference)) <= 20


def test_several_prompts_have_a_room_each() -> None:
    fields = {
        "prompt": ["x", "y"],
        "bootstrap_host": ["a", "b"],
        "bootstrap_port": [1, 2],
        "bootstrap_room": [3, 4],
    }
    asked = read(CompletionBody, fields).asked("decode", 2)
    assert asked == FetchFields(None, (BootstrapFields("a", 1, 3), BootstrapFields("b", 2, 4)))
    one = refusal({**fields, "bootstrap_room": 3}, "decode", 2)
    assert one.param == "bootstrap_room" and "give one per prompt" in str(one)
    few = refusal({**fields, "bootstrap_port": [1]}, "decode", 2)
    assert few.param == "bootstrap_port"


def test_choices_of_a_prompt_may_have_rooms_too() -> None:
    """sglang-router draws one room per choice; both servers use the first."""
    fields = {"n": 2, "bootstrap_host": ["a", "a"], "bootstrap_port": [1, 1], "bootstrap_room": [3, 4]}
    assert read(ChatBody, CHAT | fields).asked("prefill") == LendFields((3,))
    assert read(ChatBody, CHAT | fields).asked("decode") == FetchFields(None, (BootstrapFields("a", 1, 3),))


@pytest.mark.parametrize(
    ("fields", "role", "field"),
    [
        ({"kv_transfer_params": TOLD}, None, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, None, "kv_transfer_params"),
        ({"bootstrap_room": 1}, None, "bootstrap_room"),
        ({"kv_transfer_params": TOLD}, "prefill", "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "decode", "kv_transfer_params.do_remote_decode"),
        (
            {"kv_transfer_params": TOLD | {"do_remote_decode": True}},
            "prefill",
            "kv_transfer_params.do_remote_prefill",
        ),
        (
            {"kv_transfer_params": TOLD | {"do_remote_decode": True}},
            "decode",
            "kv_transfer_params.do_remote_decode",
        ),
        ({"kv_transfer_params": CACHED}, "decode", "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": CACHED}, None, "kv_transfer_params"),
        (
            {"kv_transfer_params": TOLD | {"specdec": TOLD["specdec"] | {"cached_only": True}}},
            "both",
            "kv_transfer_params.specdec.cached_only",
        ),
        (
            {"kv_transfer_params": CACHED | {"do_remote_prefill": True}},
            "both",
            "kv_transfer_params.specdec.cached_only",
        ),
        (
            {"kv_transfer_params": CACHED | {"do_remote_decode": False}},
            "both",
            "kv_transfer_params.specdec.cached_only",
        ),
        (
            {"kv_transfer_params": CACHED | {"specdec": {"v": 1, "cached_only": 1}}},
            "both",
            "kv_transfer_params.specdec.cached_only",
        ),
        (
            {"kv_transfer_params": CACHED | {"specdec": {"cached_only": True}}},
            "both",
            "kv_transfer_params.specdec.v",
        ),
        ({"kv_transfer_params": TOLD, "bootstrap_room": 1}, "decode", "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_host": "a", "bootstrap_port": 1}, "both", "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_port": 1}, "decode", "bootstrap_host"),
        ({"bootstrap_room": 1, "bootstrap_host": "a"}, "decode", "bootstrap_port"),
        ({"bootstrap_host": "a"}, "decode", "bootstrap_room"),
        ({"bootstrap_port": 1}, "decode", "bootstrap_room"),
        ({"bootstrap_room": [1, 2]}, "decode", "bootstrap_room"),
        ({"bootstrap_room": MOST_ROOM + 1}, "decode", "bootstrap_room"),
        ({"bootstrap_room": -1}, "decode", "bootstrap_room"),
        ({"bootstrap_room": "1"}, "decode", "bootstrap_room"),
        ({"bootstrap_room": True}, "decode", "bootstrap_room"),
        ({"bootstrap_port": 0}, "decode", "bootstrap_port"),
        ({"bootstrap_host": "a" * 300}, "decode", "bootstrap_host"),
        ({"kv_transfer_params": 7}, "both", "kv_transfer_params"),
        ({"kv_transfer_params": []}, "both", "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "both", "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": {"do_remote_prefill": 1}}, "both", "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": TOLD | {"remote_port": "5600"}}, "both", "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": TOLD | {"remote_port": 65536}}, "both", "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": TOLD | {"remote_host": 7}}, "both", "kv_transfer_params.remote_host"),
        (
            {"kv_transfer_params": TOLD | {"remote_engine_id": ["x"]}},
            "both",
            "kv_transfer_params.remote_engine_id",
        ),
        ({"kv_transfer_params": TOLD | {"specdec": "x"}}, "both", "kv_transfer_params.specdec"),
        ({"kv_transfer_params": TOLD | {"specdec": {"v": 1}}}, "both", "kv_transfer_params.specdec.leases"),
        (
            {"kv_transfer_params": TOLD | {"specdec": {"v": 1, "leases": [{"lease": 1, "mac": "x"}]}}},
            "both",
            "kv_transfer_params.specdec.leases.0.lease",
        ),
        *(
            (
                {"kv_transfer_params": TOLD | {"specdec": {"v": 1, "leases": [LEASE | {"tokens": tokens}]}}},
                "both",
                "kv_transfer_params.specdec.leases.0.tokens",
            )
            for tokens in (0, -1, True, 1.5, "7")
        ),
    ],
)
def test_contradictory_fields_are_refused_by_name(fields: dict[str, Any], role: Any, field: str) -> None:
    failure = refusal(fields, role)
    assert str(failure).startswith(f"{field}: ") and failure.param == field.partition(".")[0]


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False, "do_remote_prefill": False}, {"x": 1}])
def test_params_that_request_nothing_change_nothing(params: dict[str, Any]) -> None:
    for role in ("prefill", "decode", "both"):
        assert read(CompletionBody, PROMPT | {"kv_transfer_params": params}).asked(role) is None
    assert read(CompletionBody, PROMPT).asked(None) is None
    assert (
        read(CompletionBody, PROMPT | {"kv_transfer_params": None, "bootstrap_room": None}).asked(None)
        is None
    )


def test_a_salt_goes_with_the_prompt_that_is_lent() -> None:
    body = read(
        CompletionBody, PROMPT | {"cache_salt": "s", "kv_transfer_params": {"do_remote_decode": True}}
    )
    assert lending_params(body).cache_salt == "s"
