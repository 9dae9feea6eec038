"""Prompts with a common prefix have equal hashes for it, within one tenant and model."""

import json
import random
from typing import Any

import pytest

from specdec.ray.prompts import LENGTHS, STEP, Known, look_at

LONG = "".join(random.Random(0).choices("abcdefgh ", k=6 * STEP))


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def common(one: bytes, other: bytes, one_key: str = "k", other_key: str = "k") -> int:
    known = Known()
    known.note(look_at(one, {"Authorization": one_key}))
    return known.hit(look_at(other, {"Authorization": other_key}))


def test_the_next_turn_of_a_chat_begins_as_the_last_one() -> None:
    turns: list[dict[str, str]] = [{"role": "user", "content": LONG}]
    more = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
    shared = common(body(model="m", messages=turns), body(messages=more, temperature=0.5, model="m"))
    assert 6 * STEP <= shared < 7 * STEP
    assert common(body(model="m", messages=more), body(model="m", messages=turns)) == shared
    assert common(body(model="m", messages=turns), body(model="m", messages=turns[:0])) == 0


@pytest.mark.parametrize("fields", [{"model": "n"}, {"cache_salt": "s"}, {"tools": [{"name": "f"}]}])
def test_what_makes_another_prefix_makes_other_hashes(fields: dict[str, Any]) -> None:
    assert common(body(model="m", prompt=LONG), body(model="m", prompt=LONG)) > 5 * STEP
    assert common(body(model="m", prompt=LONG), body(**{"model": "m", "prompt": LONG, **fields})) == 0


def test_tenants_share_nothing() -> None:
    assert common(body(prompt=LONG), body(prompt=LONG), "k", "l") == 0


def test_token_ids_are_prompts_too() -> None:
    ids = random.Random(1).choices(range(50000), k=1000)
    assert common(body(prompt=ids), body(prompt=[*ids[:500], *ids])) >= len(json.dumps(ids[:500])) - 128


def test_a_first_difference_ends_what_is_shared() -> None:
    other = LONG[: 3 * STEP] + "X" + LONG[3 * STEP + 1 :]
    assert common(body(prompt=LONG), body(prompt=other)) == 3 * STEP


def test_what_is_no_object_has_no_beginning() -> None:
    for data in (b"", b"[1]", b"\x00", b'{"prompt": "'):
        prompt = look_at(data, {})
        assert prompt.fields is None and not prompt.beginnings and prompt.body == data


@pytest.mark.parametrize("size", [10_000, 100_000, 1 << 22])
def test_a_long_prompt_has_few_hashes_and_little_of_it_is_missed(size: int) -> None:
    text = random.Random(2).randbytes(size // 2).hex()
    prompt = look_at(body(prompt=text), {})
    assert len(prompt.beginnings) < 256
    at = size * 3 // 4
    other = text[:at] + "X" + text[at + 1 :]
    assert at * 15 / 16 < common(body(prompt=text), body(prompt=other)) <= at
    assert common(body(prompt=text), body(prompt=text)) == max(n for n in LENGTHS if n <= prompt.size)


def test_the_longest_beginnings_are_forgotten_first() -> None:
    known, old, new = Known(most=8), body(prompt=LONG), body(prompt=LONG[::-1])
    known.note(look_at(old, {}))
    known.note(look_at(new, {}))
    assert known.hit(look_at(new, {})) == 6 * STEP
    assert known.hit(look_at(old, {})) == 2 * STEP
    known.forget()
    assert known.hit(look_at(new, {})) == 0
