import json
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.acceptance.prompts import CATEGORIES, BenchPrompt, bundled, choose, read_prompts
from specdec.errors import ConfigError


def write(folder: Path, *lines: Any, name: str = "set.jsonl") -> Path:
    path = folder / name
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8"
    )
    return path


@pytest.mark.parametrize("category", CATEGORIES)
def test_bundled_sets_have_64_prompts_of_their_category(category: str) -> None:
    prompts = bundled([category])
    assert len(prompts) == 64
    assert {prompt.category for prompt in prompts} == {category}
    assert all(prompt.text and prompt.token_ids is None and not prompt.messages for prompt in prompts)


def test_bundled_prompts_are_all_different() -> None:
    prompts = bundled()
    assert len({prompt.text for prompt in prompts}) == len({prompt.name for prompt in prompts}) == 256
    with pytest.raises(ConfigError, match="'poems' is none of code, edit"):
        bundled(["poems"])


USER = {"role": "user", "content": "Hi"}
SHAPES: list[tuple[Any, BenchPrompt]] = [
    ({"prompt": "a"}, BenchPrompt("set", "line 1", "a")),
    ({"text": "a", "meta": {}}, BenchPrompt("set", "line 1", "a")),
    ({"prompt": [3, 0, 5]}, BenchPrompt("set", "line 1", None, (3, 0, 5))),
    ({"prompt_token_ids": [3], "prompt": None}, BenchPrompt("set", "line 1", None, (3,))),
    # HumanEval, GSM8K
    ({"task_id": "HumanEval/0", "prompt": "def f", "test": "t"}, BenchPrompt("set", "HumanEval/0", "def f")),
    ({"question": "1+1?", "answer": "2"}, BenchPrompt("set", "line 1", "1+1?")),
    # MT-bench, Spec-Bench, SPEED-Bench
    (
        {"question_id": 81, "category": "writing", "turns": ["Hi", "More"], "reference": []},
        BenchPrompt("writing", "81", "Hi", None, (USER,)),
    ),
    # OpenAI's messages, and lines of its batch files
    (
        {"messages": [USER, {"role": "assistant", "content": "x"}, USER]},
        BenchPrompt("set", "line 1", "Hi", None, (USER,)),
    ),
    (
        {"custom_id": "r-1", "method": "POST", "body": {"model": "m", "messages": [USER]}},
        BenchPrompt("set", "r-1", "Hi", None, (USER,)),
    ),
    (
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ]
        },
        BenchPrompt("set", "line 1", "Hi", None, ({"role": "system", "content": "S"}, USER)),
    ),
    # ShareGPT
    (
        {"id": "abc", "conversations": [{"from": "gpt", "value": "?"}, {"from": "human", "value": "Hi"}]},
        BenchPrompt("set", "abc", "Hi", None, (USER,)),
    ),
]


@pytest.mark.parametrize(("line", "prompt"), SHAPES)
def test_public_shapes_are_read(line: Any, prompt: BenchPrompt, tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, line)) == [prompt]


def test_list_of_objects_is_parsed_as_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"id": "x", "prompt": "b"}], indent=2))
    assert [(prompt.name, prompt.text) for prompt in read_prompts(path)] == [("item 1", "a"), ("x", "b")]


def test_empty_lines_marks_and_strange_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'.encode())
    assert [(prompt.name, prompt.text) for prompt in read_prompts(path)] == [
        ("line 1", "a\u2028b"),
        ("line 3", "c"),
    ]


def test_text_file_is_one_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, "once", "upon", name="tale.txt")
    assert read_prompts(path) == [BenchPrompt("tale", "tale", "once\nupon\n")]


FAULTS = [
    ("{", r"set\.jsonl, line 2: is no JSON .* expected one object a line"),
    ('"text"', r"line 2: expected a JSON object such as .* found a text"),
    ("{}", r"line 2: expected one of prompt, .*, found nothing"),
    ('{"promt": "a"}', r"line 2: expected one of prompt, .*, found promt"),
    ('{"prompt": ""}', r"line 2: 'prompt' is empty"),
    ('{"prompt": []}', r"line 2: 'prompt' must be a string"),
    ('{"prompt": [1, -2]}', r"line 2: 'prompt' must be .* token ids from 0 on"),
    ('{"prompt": [true]}', r"line 2: 'prompt' must be"),
    ('{"prompt": 3.5}', r"found a number"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2: 'messages' has no message of a user"),
    ('{"messages": [{"role": "user"}]}', r"content is not text"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', r"content is not text"),
    ('{"messages": [{"role": "system", "content": "x"}, 3]}', r"a message that is no object, but a number"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS)
def test_errors_name_the_file_the_line_and_the_expected_value(
    line: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(write(tmp_path, {"prompt": "fine"}, line))
    assert caught.value.field == "prompts"
    assert str(tmp_path) in str(caught.value)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(write(tmp_path, " ", name="blank.txt"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8 text from byte 12"):
        read_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(ConfigError, match="begins as a JSON list"):
        read_prompts(write(tmp_path, "[{]"))


def test_categories_and_limit_choose(tmp_path: Path) -> None:
    lines = [{"prompt": f"{kind}{i}", "category": kind} for i in range(3) for kind in ("x", "y")]
    path = write(tmp_path, *lines)
    assert [prompt.text for prompt in choose(path, ["y"], 2)] == ["y0", "y1"]
    assert [prompt.text for prompt in choose(path, limit=1)] == ["x0", "y0"]
    assert len(choose(None, ["edit", "code"], 5)) == 10
    with pytest.raises(ConfigError, match=r"'z' is none that .* has: x, y") as caught:
        choose(path, ["z"])
    assert caught.value.field == "category"
