"""The tool call formats, and detection of a model's format."""

from collections.abc import Mapping

from specdec.text.answers.calls import CallFormat
from specdec.text.answers.deepseek import SEPARATOR, DeepSeek, DeepSeekMarkup
from specdec.text.answers.hermes import Hermes
from specdec.text.answers.json_calls import JsonList, LeadingJson
from specdec.text.answers.named_calls import CALLS, Kimi, Mistral
from specdec.text.answers.qwen3_coder import Qwen3Coder
from specdec.text.chat_template import ChatTemplate

CALL_FORMATS: Mapping[str, CallFormat] = {
    "qwen3_coder": Qwen3Coder(),
    "kimi_k2": Kimi(),
    "deepseek_v32": DeepSeekMarkup(),
    "deepseek_v3": DeepSeek(sign=f"'{SEPARATOR}' + tool['function']['name']", fenced=True),
    "deepseek_v31": DeepSeek(sign=SEPARATOR, fenced=False),
    "nemotron_json": JsonList("<TOOLCALL>", sign="<TOOLCALL>", closing="</TOOLCALL>"),
    "granite": JsonList("<|tool_call|>", "<tool_call>", sign="<|tool_call|>"),
    "mistral": Mistral(),
    "mistral_v3": JsonList(CALLS, sign=CALLS),
    "llama3_json": LeadingJson(),
    "hermes": Hermes(),
}
"""Ordered: detection picks the first format whose marker is in the chat template."""


def call_format(name: str, template: ChatTemplate) -> CallFormat | None:
    """Find the model's call format; None if the template has no tools or the format is unknown."""
    if template.is_plain:
        return None
    if name == "auto":
        return next((form for form in CALL_FORMATS.values() if form.sign in template.source), None)
    return CALL_FORMATS.get(name)
