"""The secret, the MAC, the hash of a prompt, and strictly validated bodies."""

import json
import secrets

import pytest
import torch

from specdec.errors import ConfigError
from specdec.reach.messages import (
    MOST_BEATS,
    ChannelMessage,
    HeartbeatRequest,
    HiddenState,
    OpenRequest,
    OpenResponse,
    read_refusal,
    write_refusal,
)
from specdec.reach.prefix_log import PrefixLogChanges
from specdec.reach.protocol import (
    STATUSES,
    VARIABLE,
    VERSION,
    LeaseReference,
    PrefixIdentity,
    ReachError,
    Secret,
    differences,
)
from tests.reach.peers import IDS, PROMPT, SECRET

GOOD = {"engine": "0" * 32, "hash": "f" * 64, "length": 5, "num_cached": 0, "reader": "a" * 32}


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "x" * 20 + " y", "x" * 20 + "\n", "ä" * 20])
def test_a_secret_that_could_be_guessed_or_not_be_sent_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="at least 16") as caught:
        Secret(text)
    assert caught.value.field == VARIABLE and (not text or text not in str(caught.value))


def test_the_secret_comes_from_the_environment_alone() -> None:
    assert Secret.read({}) is None
    secret = Secret.read({VARIABLE: f"{SECRET}\n"})
    assert secret and secret.digest("request", "x") == Secret(SECRET).digest("request", "x")
    assert SECRET not in repr(secret)


def test_a_mac_covers_all_of_a_claim_and_is_of_one_secret() -> None:
    secret = Secret(SECRET)

    def verified(mac: str, prompt: PrefixIdentity = PROMPT, engine: str = "e", lease: str = "l") -> bool:
        return secret.verifies(LeaseReference("any", 1, engine, lease, mac), prompt)

    mac = secret.sign("e", "l", PROMPT)
    assert verified(mac)
    assert not verified(Secret(SECRET + "x").sign("e", "l", PROMPT))
    assert not verified(secret.sign("el", "", PROMPT), engine="e", lease="l")
    for prompt in (
        PrefixIdentity.of(IDS, "s"),
        PrefixIdentity(PROMPT.hash, 9, PROMPT.salt),
        PrefixIdentity("0" * 64, 10, PROMPT.salt),
    ):
        assert not verified(mac, prompt)
        assert not verified(secret.sign("e", "l", prompt))
    assert not verified(mac, engine="f") and not verified(mac, lease="m")
    assert not verified("") and not verified(mac.upper()) and not verified("ü" * 64)
    for _ in range(1000):
        assert not verified(secrets.token_hex(32))


def test_hashes_differ_by_tokens_order_salt_and_length() -> None:
    prompts = [
        PrefixIdentity.of(IDS),
        PrefixIdentity.of(IDS[::-1]),
        PrefixIdentity.of(IDS[:-1]),
        PrefixIdentity.of([*IDS[:-1], IDS[-1] + (1 << 16)]),
        PrefixIdentity.of(IDS, "a"),
        PrefixIdentity.of(IDS, "b"),
        PrefixIdentity.of([]),
    ]
    assert len({prompt.hash for prompt in prompts}) == len(prompts)
    assert PrefixIdentity.of(torch.tensor(IDS).tolist()) == PROMPT


def test_messages_change_only_with_the_version() -> None:
    """A server that misses a field answers `malformed`; another version is refused when servers connect."""
    modules = {ChannelMessage.__module__, PrefixLogChanges.__module__}
    messages = [kind for kind in ChannelMessage.__subclasses__() if kind.__module__ in modules]
    assert VERSION == 2
    assert {kind.__name__: sorted(kind.model_fields) for kind in messages} == {
        "AgentInfo": ["arena", "metadata", "rank"],
        "AgentsResponse": ["agents", "carrier", "engine", "facts", "fingerprint"],
        "ChecksumRequest": ["engine", "indices", "reader"],
        "ChecksumResponse": ["sums"],
        "CloseRequest": ["engine", "read", "reader"],
        "CloseResponse": ["intact"],
        "ErrorResponse": ["code", "message", "param"],
        "HeartbeatRequest": ["engine", "leases"],
        "HeartbeatResponse": ["leases"],
        "HiddenState": ["data", "dtype"],
        "OpenRequest": ["engine", "hash", "length", "num_cached", "reader"],
        "OpenResponse": ["blocks", "first", "hidden", "lease", "length", "ready", "state"],
        "PrefixLogChanges": ["added", "epoch", "gone", "left_out", "seq", "whole"],
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hash": "F" * 64}, "hash"),
        ({"hash": "f" * 64 + "\n"}, "hash"),
        ({"hash": 5}, "hash"),
        ({"hash": None}, "hash"),
        ({"length": 0}, "length"),
        ({"length": "5"}, "length"),
        ({"length": 5.0}, "length"),
        ({"length": True}, "length"),
        ({"length": 1 << 70}, "length"),
        ({"num_cached": -1}, "num_cached"),
        ({"reader": "ａ" * 32}, "reader"),
        ({"reader": ["a" * 32]}, "reader"),
        ({"engine": ""}, "engine"),
    ],
)
def test_a_field_that_does_not_fit_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(ReachError, match=f"OpenRequest.{field}") as caught:
        OpenRequest.from_json(json.dumps(GOOD | change).encode())
    assert caught.value.field == field and caught.value.status == 400 and "give" in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_a_field_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ReachError, match=f"OpenRequest.{name}"):
        OpenRequest.from_json(json.dumps({own: value for own, value in GOOD.items() if own != name}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b"NaN",
        json.dumps(GOOD).encode() + b"x",
        json.dumps(GOOD | {"length": float("nan")}).encode(),
        json.dumps(GOOD | {"more": 1}).encode(),
        json.dumps(GOOD | {"\ud800": 1}).encode(),
    ],
)
def test_invalid_bodies_are_refused(data: bytes) -> None:
    with pytest.raises(ReachError) as caught:
        OpenRequest.from_json(data)
    assert caught.value.reason == "malformed" and len(str(caught.value)) < 400
    write_refusal(caught.value)


def test_a_beat_is_bounded() -> None:
    beat = {"engine": "0" * 32, "leases": ["1" * 32] * (MOST_BEATS + 1)}
    with pytest.raises(ReachError, match=r"HeartbeatRequest.leases.*at most 4,096"):
        HeartbeatRequest.from_json(json.dumps(beat).encode())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_hidden_vector_crosses_bit_for_bit(dtype: torch.dtype) -> None:
    hidden_1D = torch.tensor([1.5, -0.0, float("nan"), float("inf"), 3e-5], dtype=dtype)
    there = HiddenState.from_json(HiddenState.of(hidden_1D).write()).tensor
    assert there.dtype == dtype
    assert torch.equal(there.view(torch.uint8), hidden_1D.view(torch.uint8))


@pytest.mark.parametrize("data", ["", "A", "AAAA", "ä", "AAA=AAA="])
def test_an_invalid_hidden_vector_is_refused(data: str) -> None:
    with pytest.raises(ReachError, match="hidden"):
        _ = HiddenState(dtype="float64", data=data).tensor


def test_an_answer_with_ids_out_of_range_is_refused() -> None:
    own = {"lease": "1" * 32, "length": 5, "ready": 5, "first": 0, "blocks": [1], "state": 2, "hidden": None}
    assert OpenResponse.from_json(json.dumps(own).encode()).is_whole
    for change in ({"blocks": [-1]}, {"blocks": [1 << 31]}, {"blocks": [1.0]}, {"state": -1}, {"ready": -1}):
        with pytest.raises(ReachError):
            OpenResponse.from_json(json.dumps(own | change).encode())


def test_a_refusal_round_trips_with_reason_field_and_message() -> None:
    for reason in STATUSES:
        there = read_refusal(write_refusal(ReachError(reason, "Do that.", field="hash")), STATUSES)
        assert (there.reason, str(there), there.field) == (reason, "Do that.", "hash")
    for data in (b"", b"{}", b'{"error": 5}', b'{"error": {"code": "x"}}', b"[" * 100_000, b"\xff"):
        assert read_refusal(data, STATUSES).reason == "garbled"
    strange = {"error": {"code": "peer_down", "message": "", "param": None}}
    assert read_refusal(json.dumps(strange).encode(), STATUSES).reason == "garbled", "it is ours to say"


def test_differences_are_named() -> None:
    said = differences({"model": "a", "dtype": "x"}, {"model": "b", "dtype": "x", "head": "none"})
    assert said == "head is missing there and none here, model is a there and b here"
