"""Fields of a JSON object are located, and changed without touching another byte."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.ray.spans import MOST_FIELDS, MOST_MARKS, PART, fields_of, value_of, with_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=6)
STYLES = st.sampled_from(({}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}))


@given(OBJECTS, STYLES)
def test_fields_are_those_that_json_reads(found: dict[str, Any], style: dict[str, Any]) -> None:
    body = json.dumps(found, **style).encode(errors="surrogatepass")
    fields = fields_of(body)
    assert {name: value_of(body, fields, name) for name in fields} == found


@given(OBJECTS, STYLES, st.dictionaries(st.text(), VALUES, max_size=4))
def test_changes_change_nothing_else(
    found: dict[str, Any], style: dict[str, Any], changes: dict[str, Any]
) -> None:
    body = json.dumps(found, **style).encode(errors="surrogatepass")
    fields = fields_of(body)
    told = {name: json.dumps(value).encode() for name, value in changes.items()}
    changed = with_fields(body, fields, told)
    assert json.loads(changed) == {**found, **changes}
    assert with_fields(body, fields, {}) == body
    after = fields_of(changed)
    for name in found.keys() - changes.keys():
        assert changed[slice(*after[name])] == body[slice(*fields[name])]


def test_numbers_and_order_stay_as_they_were_written() -> None:
    body = b' {"b": 1.0e+02, "max_tokens" : 20,\n"a": 12345678901234567, "c": [1,\t{"max_tokens": 3}]} '
    assert with_fields(body, fields_of(body), {"max_tokens": b"1", "new": b"[2]"}) == (
        b' {"b": 1.0e+02, "max_tokens" : 1,\n"a": 12345678901234567, "c": [1,\t{"max_tokens": 3}],"new":[2]} '
    )


def test_of_equal_fields_the_last_counts() -> None:
    body = b'{"n": 1, "n": 2}'
    assert value_of(body, fields_of(body), "n") == 2
    assert json.loads(with_fields(body, fields_of(body), {"n": b"3"}))["n"] == 3


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"[]",
            b"1",
            b"null",
            b'"{"',
            b"{",
            b'{"a"}',
            b'{"a":}',
            b'{"a":1',
            b'{"a":1,}',
            b'{"a":[1}',
            b"{1:2}",
        ),
        *(b'{"a":1}}', b'{"a":"x}', b'{"a" 1}', b'{"a":1 "b":2}', b"\xff\xfe{}", b'{"\\uZZZZ":1}'),
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"missing|does not end|follows|Invalid"):
        fields_of(body)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, *range(PART - 4, PART + 4), 3 * PART])
def test_long_strings_end_where_they_end(length: int, nested: bool) -> None:
    for text in (
        "a" * length + '"',
        "a" * length + "\\",
        "a" * length + '\\"]}',
        '"' * (length // 2),
        "\\" * length,
    ):
        found = {"p": [{"q": text, "r": "}"}] if nested else text, "model": "m"}
        body = json.dumps(found).encode()
        fields = fields_of(body)
        assert {name: value_of(body, fields, name) for name in fields} == found
        with pytest.raises(ValueError, match=r"does not end|missing"):
            fields_of(body[: body.index(b"model") - 4])


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({f"f{i}": 1 for i in range(MOST_FIELDS + 1)}).encode(),
        b'{"a":' + b"[" * MOST_MARKS + b"]" * MOST_MARKS + b"}",
        b'{"a":[' + b"[]," * (MOST_MARKS // 2) + b"1]}",
        b'{"a":{},"b":[' + b'"",' * MOST_MARKS + b'""]}',
    ],
    ids=["fields", "depth", "lists", "strings"],
)
def test_a_body_of_too_many_parts_is_not_looked_through(body: bytes) -> None:
    assert len(body) < 1 << 21
    with pytest.raises(ValueError, match="too m"):
        fields_of(body)
