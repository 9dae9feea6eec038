"""Chat template variables that requests and settings may set."""

from typing import Annotated, Any

from pydantic import AfterValidator

from specdec.config.base import contradiction

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens used by templates, under their names in `tokenizer_config.json`."""
FIELD = "chat_template_kwargs"
_TOKENIZERS = "it comes from tokenizer_config.json"
TAKEN = {
    "messages": "it is the request's messages",
    "tools": "it is the request's tools",
    "add_generation_prompt": "the field of that name sets it",
    "continue_final_message": "continuing an assistant message is not supported",
    "tokenize": "the server needs tokens",
    "chat_template": "the folder's own is used",
    **dict.fromkeys(SPECIAL, _TOKENIZERS),
}
"""Names that cannot be set, with the reason: they would be dropped, or change the chat silently."""


def check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Raise for variables that the chat or its tokenizer determines."""
    for name in variables:
        if name in TAKEN:
            raise contradiction(FIELD, f"{name} cannot be set: {TAKEN[name]}; leave it out.")
    return variables


Variables = Annotated[dict[str, Any], AfterValidator(check_variables)]
