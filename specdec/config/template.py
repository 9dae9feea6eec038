"""Variables of chat templates: what may be given of them, in requests and in settings."""

from typing import Annotated, Any

from pydantic import AfterValidator

from specdec.config.base import contradiction

SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that templates use, by their names in `tokenizer_config.json`."""
FIELD = "chat_template_kwargs"
_TOKENIZERS = "the folder's tokenizer_config.json says it"
TAKEN = {
    "messages": "a template reads the messages of the request",
    "tools": "a template reads the tools of the request",
    "add_generation_prompt": "a chat's field of that name says it",
    "continue_final_message": "continuing an assistant message is not supported",
    "tokenize": "the server needs tokens",
    "chat_template": "the folder's own is read",
    **dict.fromkeys(SPECIAL, _TOKENIZERS),
}
"""Names that are no variables to give, and why: they would be dropped, or change the chat unseen."""


def check_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that the chat itself, or its tokenizer, settles."""
    for name in given:
        if name in TAKEN:
            raise contradiction(FIELD, f"{name} is no variable to give: {TAKEN[name]}; leave it out.")
    return given


Variables = Annotated[dict[str, Any], AfterValidator(check_variables)]
