import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.errors import CheckpointError, RequestError
from specdec.text.chat_template import load_template, render
from specdec.text.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": 'Say "hé"\n'},
    {"role": "assistant", "content": "hé"},
    {"role": "user", "content": "Again."},
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "break": "{% for m in messages %}{{ m.role }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "blocks": "  {% set n = 1 %}\n{% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n{{ n }}",
    "date": "{{ strftime_now('%Y') | length }}{{ eos_token }}{{ missing }}",
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(template: Any, file: str = "") -> Path:
        config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        if file:
            (tmp_path / "chat_template.jinja").write_text(file, "utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_transformers_does(name: str, write: Write, hybrid: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(hybrid / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    template = load_template(write(TEMPLATES[name]))
    for answer in (True, False):
        expected = theirs.apply_chat_template(
            CHAT, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=answer
        )
        assert template.render(CHAT, answer=answer) == expected
    assert not template.is_plain


def test_template_in_its_own_file_comes_first(write: Write) -> None:
    assert render(write("config", file="file"), CHAT) == "file"


def test_default_is_chosen_among_named_templates(write: Write) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain {{ bos_token }}"},
    ]
    assert render(write(named), CHAT) == "plain <s>"


def test_chats_with_tools_have_the_template_that_is_named_for_them(write: Write) -> None:
    named = [{"name": "tool_use", "template": "{{ tools[0] }}"}, {"name": "default", "template": "plain"}]
    template = load_template(write(named))
    assert template.render(CHAT, {"tools": ["f"]}) == "f" and template.render(CHAT, {"tools": []}) == "plain"
    assert template.source == "{{ tools[0] }}"
    folder = write(named, file="file {{ tools }}")
    assert load_template(folder).render(CHAT, {"tools": ["f"]}) == "file ['f']"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("own {{ tools }}", "utf-8")
    assert load_template(folder).render(CHAT, {"tools": ["f"]}) == "own ['f']"
    assert load_template(folder).render(CHAT) == "file "


def test_tools_are_rendered_as_in_transformers(write: Write, hybrid: Path) -> None:
    source = "{% for t in tools %}{{ t | tojson }};{{ t.function.parameters | tojson(indent=4) }}{% endfor %}"
    parameters = {"type": "object", "properties": {"é": {"type": ["string", "null"], "default": None}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "<f>", "parameters": parameters}}]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hybrid / "tokenizer.json"))
    expected = theirs.apply_chat_template(CHAT, tools=tools, chat_template=source, tokenize=False)
    assert load_template(write(source)).render(CHAT, {"tools": tools}) == expected


def test_variables_do_not_replace_the_chat(write: Write) -> None:
    template = load_template(write("{{ messages | length }}{{ own }}{{ add_generation_prompt }}"))
    variables = {"messages": [], "own": "x", "answer": 1, "self": 2, "add_generation_prompt": 3}
    assert template.render(CHAT, variables) == "4xTrue"


def test_a_folder_without_a_template_joins_the_texts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": " "}')
    template = load_template(tmp_path)
    assert template.is_plain
    assert template.render(CHAT[:2]) == 'Be <brief> & kind.\n\nSay "hé"\n'
    assert "has no chat template" in caplog.text


def test_template_reaches_nothing_of_this_process(write: Write) -> None:
    for escape in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(RequestError, match="refuses them"):
            render(write(escape), CHAT)


def test_a_template_error_is_a_request_error(write: Write) -> None:
    with pytest.raises(RequestError, match="no tools") as caught:
        render(write(CHATML), [{"role": "tool", "content": "x"}])
    assert caught.value.field == "messages"


def test_template_that_does_not_parse_names_its_file(write: Write) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json has a chat template that does not parse"
    ):
        load_template(write("{% for %}"))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_template(write("", file="{{"))


@pytest.mark.parametrize(
    "template", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for i in m %}" * 25 + "{% endfor %}" * 25]
)
def test_template_that_is_nested_too_deeply_names_its_file(template: str, write: Write) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has a chat template that does not"):
        load_template(write(template))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_link_to_nothing_is_not_read_as_absent(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(CheckpointError, match=rf"{name} is not a file"):
        load_template(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_config_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not (a )?JSON"):
        load_template(tmp_path)


def test_rendered_chat_is_encoded_without_a_second_beginning(hybrid: Path, tmp_path: Path) -> None:
    inner = json.loads((hybrid / "tokenizer.json").read_text("utf-8"))
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    inner["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner), "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [7, *tokenizer.encode("ab", special=False)]
