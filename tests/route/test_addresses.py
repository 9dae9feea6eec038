"""Replica addresses as users write them, and the error messages for mistakes."""

from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.route.addresses import Role, given_addresses, read_file
from specdec.route.settings import RouteConfig


def urls(**settings: Any) -> list[tuple[str, Role, int]]:
    found = given_addresses(RouteConfig(**settings))
    return [(own.url, own.role, own.bootstrap_port) for own in found]


def test_lists_are_written_with_commas_or_again_and_again() -> None:
    given = ["http://a:1,http://b:2/ ,", "https://[::1]:3"]
    assert [url for url, *_ in urls(replicas=given)] == ["http://a:1", "http://b:2", "https://[::1]:3"]


def test_roles_and_side_channels() -> None:
    assert urls(prefill=["http://a:1,http://b?bootstrap=7"], decode=["http://c:1"], bootstrap_port=6) == [
        ("http://a:1", Role.PREFILL, 6),
        ("http://b", Role.PREFILL, 7),
        ("http://c:1", Role.DECODE, 6),
    ]


def test_a_file_has_roles_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    path.write_text(
        "# all\n\nhttp://a:1 # first\nprefill http://b:2?bootstrap=9\n  decode   http://c:3\nboth http://d:4"
    )
    found = [(own.url, own.role, own.bootstrap_port) for own in read_file(str(path), 5)]
    assert found == [
        ("http://a:1", Role.BOTH, 5),
        ("http://b:2", Role.PREFILL, 9),
        ("http://c:3", Role.DECODE, 5),
        ("http://d:4", Role.BOTH, 5),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a:8000",
            "ftp://a:1",
            "http://",
            "http://a:99999",
            "http://a:1/v1",
            "http://a:1?x=1",
            "http://u:p@a:1",
        ),
        *("http://a:1?bootstrap=0", "http://a:1?bootstrap=x", "http://a:1#f", "http://[::1", "http://a:b"),
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill: .* give scheme, host and port") as caught:
        urls(prefill=[text], decode=["http://d:1"])
    assert caught.value.field == "prefill"


def test_a_port_behind_an_address_as_sglang_has_it_is_answered_with_how_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"\?bootstrap=PORT"):
        urls(prefill=["http://a:1", "5601"], decode=["http://d:1"])


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({}, "replicas", "there are none"),
        ({"replicas": []}, "replicas", "there are none"),
        ({"prefill": ["http://a:1"]}, "decode", "give --decode too"),
        ({"decode": ["http://a:1"]}, "prefill", "give --prefill too"),
        (
            {"replicas": ["http://a:1"], "prefill": ["http://b:1"], "decode": ["http://c:1"]},
            "replicas",
            "either",
        ),
        ({"replicas": ["http://a:1"], "replicas_file": "x"}, "replicas_file", "no others"),
        ({"replicas": ["http://a:1"], "pd_protocol": "dynamo"}, "pd_protocol", "vllm"),
        ({"replicas": ["http://a:1"], "attempts": 0}, "attempts", "at least 1"),
        ({"replicas": ["http://a:1", "http://a:1/"]}, "replicas", "given twice"),
        ({"replicas_dns": "http://a"}, "replicas_dns", "a port"),
        ({"replicas_dns": "https://a:1"}, "replicas_dns", "http and a port"),
        ({"replicas_dns": "a"}, "replicas_dns", "no replica's address"),
        ({"replicas_dns": "http://a:1", "replicas": ["http://b:1"]}, "replicas_dns", "no others"),
        ({"replicas_dns": "http://a:1", "replicas_file": "x"}, "replicas_file", "no others"),
        ({"replicas_file": "/nowhere/at/all"}, "replicas_file", "cannot be read"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        urls(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize("line", ["http://a:1 http://b:1", "reader http://a:1", "prefill", "prefill a"])
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "replicas"
    path.write_text(f"http://z:1\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_file(str(path), 5)
    assert caught.value.field == "replicas_file"
