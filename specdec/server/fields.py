"""Fields that bodies do not have: those that are refused if they ask for something, and harmless ones."""

import logging
from collections.abc import Mapping
from typing import Any

from specdec.server.failures import Failure

logger = logging.getLogger(__name__)

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "stream_usage", "request_id", "rid"),
    *("length_penalty", "early_stopping", "spaces_between_special_tokens", "mm_processor_kwargs"),
    *("media_io_kwargs", "separate_reasoning", "stream_reasoning", "guided_decoding_backend"),
}
"""Known, and left alone: whatever they say, an answer would be the same. (Two of them steer beams alone.)"""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "top_logprobs": (0,),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "truncate_prompt_tokens": (0,),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding": (),
    "guided_whitespace_pattern": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "cache_control": (),
    "cache_marks": ([],),
}
"""Known and not supported, with the values at which they ask for nothing. Some are fields of one body."""
FORM = 'give structured_outputs: {"json": …}, {"regex": …}, {"choice": …} or {"grammar": …}'
MARK = 'put "cache_control": {"type": "ephemeral"} on a message of a chat, or on a part of its content'
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
            *("regex", "ebnf", "json_schema", "structural_tag"),
        ),
        FORM,
    ),
    "best_of": "leave it out, or give what n says",
    "top_logprobs": "give logprobs a number",
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), "give max_tokens"),
    "min_new_tokens": "give min_tokens",
    **dict.fromkeys(("cache_control", "cache_marks"), MARK),
}
"""What to do where there is more to do than to leave a field out."""


def refuse(extra: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Refuse what asks for something that nobody would do; at what `said` has a field asks for nothing."""
    for name, value in extra.items():
        if name in REFUSED and value not in (*REFUSED[name], said.get(name)):
            instead = INSTEAD.get(name, "leave it out")
            raise Failure(400, f"{name}: this server does not support it here; {instead}.", param=name)
        if name not in REFUSED and name not in HARMLESS:
            logger.debug("a request has the field %.80r, which is unknown here", name)
