"""Access control: API keys in every header, and restrictions for other origins."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from specdec.config.tenant import Tenant
from specdec.errors import ConfigError
from specdec.server.access import VARIABLE, Access
from specdec.server.failures import Failure
from specdec.server.settings import ServerConfig

LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def status(access: Access, headers: dict[str, str], *, needs_key: bool = True) -> int:
    try:
        access.admit(make_mocked_request("POST", "/v1/completions", headers=headers), needs_key=needs_key)
    except Failure as failure:
        return failure.status
    return 200


def test_keys_come_from_every_source_and_comments_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n first \n\nsecond#2\n")
    monkeypatch.setenv(VARIABLE, "third")
    access = Access(ServerConfig(api_key=["fourth"], api_key_file=str(file)))
    known = ("first", "second#2", "third", "fourth")
    for key in (*known, "# of the team", "of the team", "fifth", ""):
        assert status(access, {"Authorization": f"Bearer {key}"}) == (200 if key in known else 401)
    assert status(access, LOCAL) == 401
    assert status(access, {"Authorization": "Basic first"}) == 401
    assert status(access, {"Authorization": "bearer first", "Origin": "https://elsewhere.example"}) == 200


def test_without_keys_connections_take_turns() -> None:
    access = Access(ServerConfig())

    def ask(port: int) -> Tenant:
        transport = Mock()
        transport.get_extra_info = lambda name: ("127.0.0.1", port) if name == "peername" else None
        return access.admit(make_mocked_request("POST", "/", headers=LOCAL, transport=transport))

    first, second, again = ask(1), ask(2), ask(1)
    assert first.flow == again.flow != second.flow
    assert first == second == Tenant(), "all share what is cached"


def test_a_key_may_have_a_weight_and_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice weight=2.5\nbob  max_queued=64 weight=1\ncarol\n")
    access = Access(ServerConfig(api_key_file=str(file)))
    found = {}
    for key in ("alice", "bob", "carol"):
        tenant = access.admit(make_mocked_request("POST", "/", headers={"x-api-key": key}))
        found[key] = (tenant.weight, access.weight(tenant.caller), access.max_choices(tenant.caller, 700))
    assert found == {"alice": (2.5, 2.5, 500), "bob": (1.0, 1.0, 64), "carol": (1.0, 1.0, 350)}
    for wrong in (
        "weight=0",
        "weight=-1",
        "weight=inf",
        "weight=nan",
        "weight",
        "max_queued=0",
        "max_queued=1.5",
    ):
        with pytest.raises(ConfigError, match="api_key: expected 'KEY', 'KEY weight=2'"):
            Access(ServerConfig(api_key=[f"alice {wrong}"]))
    for wrong in (
        "two words",
        "alice weight=1 weight=2",
        "alice wait=3",
        "weight=2",
        "max_queued=3 weight=2",
    ):
        with pytest.raises(ConfigError, match="KEY has no spaces"):
            Access(ServerConfig(api_key=[wrong]))


def test_a_mistake_in_a_key_file_is_named_by_its_line_and_not_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text, why in (
        ("# keys\n\nalice weight=2\nsecret weight=x\n", "line 4: expected 'KEY'"),
        ("alice\nsecret max_queued=4\n\n  secret\n", "line 4: this key is given twice"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why) as wrong:
            Access(ServerConfig(api_key_file=str(file)))
        assert "secret" not in str(wrong.value) and wrong.value.field == "api_key_file"


@pytest.mark.parametrize(
    ("keys", "free", "most"),
    [
        (["alice"], 8, 8),
        (["alice", "bob"], 8, 4),
        (["alice", "bob"], 1, 1),
        (["alice weight=0.01", "bob"], 64, 1),
        (["alice max_queued=3", "bob"], 8, 3),
        (["alice max_queued=9", "bob"], 8, 8),
    ],
)
def test_a_key_may_have_its_share_of_the_queue_and_always_one_choice(
    keys: list[str], free: int, most: int
) -> None:
    access = Access(ServerConfig(api_key=keys))
    caller = access.admit(make_mocked_request("POST", "/", headers={"x-api-key": "alice"})).caller
    assert access.max_choices(caller, free) == most


def test_each_key_has_a_name_that_does_not_reveal_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice-key\nbob-key\nalice-key\n")

    def caller(access: Access, headers: dict[str, str]) -> str:
        return access.admit(make_mocked_request("POST", "/v1/completions", headers=headers)).caller

    access, other = (Access(ServerConfig(api_key_file=str(file))) for _ in range(2))
    names = [caller(access, {"Authorization": f"Bearer {key}-key"}) for key in ("alice", "bob", "alice")]
    assert names[0] == names[2] != names[1] and all(names)
    assert caller(access, {"x-api-key": "bob-key"}) == names[1]
    assert caller(access, {"Authorization": "Bearer wrong", "x-api-key": "bob-key"}) == names[1]
    assert caller(other, {"x-api-key": "bob-key"}) != names[1], "no other process knows it"
    held = repr(vars(access)) + repr(Tenant(names[0], "salt"))
    assert not re.search("alice|bob|salt|" + names[0], repr(Tenant(names[0], "salt")))
    assert not re.search("alice|bob", held)
    assert caller(Access(ServerConfig()), LOCAL) == "", "without keys there is one caller"


def test_an_empty_key_admits_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n\n")
    for config in (
        ServerConfig(api_key=[" "]),
        ServerConfig(api_key=[]),
        ServerConfig(api_key=["a"], api_key_file=str(file)),
    ):
        with pytest.raises(ConfigError, match="api_key"):
            Access(config)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match=VARIABLE):
        Access(ServerConfig())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (LOCAL, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "["}, 400),
        ({**LOCAL, "Origin": "http://["}, 400),
        ({}, 200),
        ({"Host": "specdec.localhost", "Origin": "http://specdec.localhost"}, 200),
        ({**LOCAL, "Origin": "http://127.0.0.1:8000"}, 200),
        ({**LOCAL, "Origin": "https://elsewhere.example"}, 403),
        ({**LOCAL, "Origin": "null"}, 403),
        ({"Host": "rebound.example:8000", "Origin": "http://rebound.example:8000"}, 403),
        ({"Host": "localhost.example", "Origin": "http://localhost.example"}, 403),
    ],
)
def test_without_keys_foreign_pages_are_refused(headers: dict[str, str], expected: int) -> None:
    assert status(Access(ServerConfig()), headers) == expected


def test_an_address_for_others_has_other_names() -> None:
    access = Access(ServerConfig(host="0.0.0.0"))
    assert access.is_open
    assert status(access, {"Host": "gpu7:8000"}) == 200
    assert status(access, {"Host": "gpu7:8000", "Origin": "http://gpu7:8000"}) == 200
    assert status(access, {"Host": "gpu7:8000", "Origin": "https://elsewhere.example"}) == 403
    assert not Access(ServerConfig()).is_open
    assert not Access(ServerConfig(host="0.0.0.0", api_key=["a"])).is_open


FOREIGN = (
    {"Host": "rebound.example:8000"},
    {"Host": "rebound.example:8000", "Origin": "http://rebound.example:8000"},
    {**LOCAL, "Origin": "https://elsewhere.example"},
)


@pytest.mark.parametrize("keys", [None, ["a"]])
def test_keyless_routes_are_closed_to_foreign_pages(keys: list[str] | None) -> None:
    access = Access(ServerConfig(api_key=keys))
    assert status(access, LOCAL, needs_key=False) == status(access, {}, needs_key=False) == 200
    assert [status(access, headers, needs_key=False) for headers in FOREIGN] == [403] * 3
    with_key = [status(access, headers | {"x-api-key": "a"}) for headers in FOREIGN]
    assert with_key == [200 if keys else 403] * 3, "a key is what such a page does not have"


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "specdec.default.svc:8000", "gpu7", "[fd00::7]:8000"])
def test_probes_of_a_server_for_others_may_call_it_as_they_like(host: str) -> None:
    access = Access(ServerConfig(host="0.0.0.0", api_key=["a"]))
    assert status(access, {"Host": host}, needs_key=False) == 200
    assert status(access, {"Host": host, "Origin": "https://elsewhere.example"}, needs_key=False) == 403


def test_behind_a_proxy_the_name_of_an_allowed_origin_is_known() -> None:
    proxied = {"Host": "App.example", "Origin": "https://app.example"}
    for origins, expected in ((None, 403), (["https://app.example"], 200), (["*"], 403)):
        access = Access(ServerConfig(allowed_origins=origins))
        assert status(access, proxied) == status(access, {"Host": "app.example"}) == expected


@pytest.mark.parametrize("name", ["a" * 5000, "a\x00b"])
def test_a_file_of_keys_may_be_named_at_any_length(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^api_key_file: .* cannot be read .*; give a text file"
    ) as refused:
        Access(ServerConfig(api_key_file=name))
    assert len(str(refused.value)) < 400
