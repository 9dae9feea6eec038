"""Sampling parameters of a request."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from specdec.config.base import Settings, contradiction
from specdec.config.fields import switch
from specdec.config.structured import Structure
from specdec.config.thinking import ThinkingSpan
from specdec.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0: logits divided by them would exceed float32."""
MOST_TOKENS = 1 << 31
MAX_STOPS = 64
MAX_IDS = 1 << 18
"""More than any vocabulary."""
MAX_BIASES = 1024
"""Limited, since each is applied for every token while other requests wait."""


def _round_to_greedy(value: object) -> object:
    return 0.0 if isinstance(value, int | float) and 0 <= value < GREEDY_BELOW else value


def _refuse_surrogates(value: object) -> object:
    try:
        if isinstance(value, str):
            value.encode()
        return value
    except UnicodeEncodeError:
        raise ConfigError(
            "SamplingParams.cache_salt is not valid Unicode; give a string of 1 to 256 characters, or None.",
            field="cache_salt",
        ) from None


def _distinct(value: object) -> object:
    """Drop duplicates; numbers beyond any token id are left alone, as they could be chosen to collide."""
    if isinstance(value, list) and all(type(token) is int and token.bit_length() <= 32 for token in value):
        return list(dict.fromkeys(value))
    return value


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
"""Stops at the first error: collecting those of all ids would block the interpreter for seconds."""
Bias = Annotated[float, Field(ge=-100, le=100)]


class SamplingParams(Settings):
    """How one request's tokens are sampled and when it ends.

    Contradictions raise, such as several choices (`n`) at temperature 0, which would be the same text.
    Filters such as `top_p` are allowed at temperature 0, where they have no effect, because clients always
    send them.
    """

    max_tokens: int = Field(
        16,
        ge=0,
        le=MOST_TOKENS,
        title="maximum generated tokens, within max_model_len",
        description="an integer from 1 to 2147483648, or 0 with prompt_logprobs",
    )
    temperature: Annotated[float, BeforeValidator(_round_to_greedy)] = Field(
        1.0,
        ge=0,
        title="sampling temperature",
        description="a number of at least 0; 0 is greedy decoding",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        title="sample from tokens up to this cumulative probability, likeliest first",
        description="a number above 0 and at most 1; 1 switches it off",
    )
    top_k: int = Field(
        0,
        ge=-1,
        title="sample from this many likeliest tokens",
        description="an integer of at least 1, or 0 or -1 to switch it off",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        title="minimum probability relative to the likeliest token",
        description="a number from 0 to 1; 0 switches it off",
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100,
        title="divides positive logits of tokens in prompt or output, multiplies negative ones",
        description="a number from 0.01 to 100; 1 switches it off",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        title="subtracted from the logit of each token in the output",
        description="a number from -2 to 2; 0 switches it off",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        title="subtracted from a token's logit per occurrence in the output",
        description="a number from -2 to 2; 0 switches it off",
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None,
        title="strings that end the output; it ends before them",
        description=f"a string or a list of at most {MAX_STOPS} strings of 1 to 1024 characters",
    )
    stop_token_ids: Annotated[TokenIds | None, BeforeValidator(_distinct)] = Field(
        None,
        title="tokens that end the output, in addition to EOS; left out of the text",
        description=f"a list of at most {MAX_IDS} token ids (integers from 0)",
    )
    include_stop_str_in_output: bool = switch(False, "keep the stop string or stop token in the text")
    skip_special_tokens: bool = switch(True, "leave special tokens out of the text")
    ignore_eos: bool = switch(False, "continue after EOS tokens, up to max_tokens")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        title="random seed; the same one gives the same output, with and without drafts. None: random",
        description="an integer of 64 bits, or None",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        title="log-probabilities of the chosen and the likeliest tokens, from raw logits",
        description="how many alternatives to show with the chosen token, 0 to 20, or None",
    )
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        None,
        title="added to the logits of these tokens",
        description=f"a mapping from at most {MAX_BIASES} token ids to numbers from -100 to 100",
    )
    allowed_token_ids: Annotated[TokenIds | None, BeforeValidator(_distinct)] = Field(
        None,
        min_length=1,
        title="restrict the output to these tokens; EOS need not be listed",
        description=f"a list of at most {MAX_IDS} token ids (integers from 0), or None",
    )
    bad_words: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None,
        title="blocked words, as tokenized at the output's start and after a space; words that begin with a "
        "line break, tab or two spaces as they are",
        description=f"a list of at most {MAX_STOPS} strings of 1 to 1024 characters and 128 tokens, or None",
    )
    n: int = Field(
        1,
        ge=1,
        le=128,
        title="number of choices; their seeds are derived from seed",
        description="an integer from 1 to 128",
    )
    min_tokens: int = Field(
        0,
        ge=0,
        title="no end token or stop string ends the output within this many tokens",
        description="an integer from 0 to max_tokens",
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        title="log-probabilities of the prompt's tokens; the first has none",
        description="how many alternatives to show with each, 0 to 20, or None",
    )
    cache_salt: Annotated[str | None, BeforeValidator(_refuse_surrogates)] = Field(
        None,
        min_length=1,
        max_length=256,
        title="share cached prefixes and earlier outputs only within this salt",
        description="a string of 1 to 256 characters, or None",
    )
    cache_marks: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        max_length=16,
        title="prefix lengths in tokens that later prompts will share; states are cached there",
        description="a list of at most 16 integers of at least 1, or None",
    )
    structured_outputs: InstanceOf[Structure] | None = Field(
        None,
        title="grammar of the output",
        description="a Structure (a JSON schema, a regular expression, ...), or None",
    )
    thinking: InstanceOf[ThinkingSpan] | None = Field(
        None,
        title="markers and budget of thinking; a grammar applies after it",
        description="a ThinkingSpan, or None",
    )
    speculate: bool = switch(True, "use drafts for this request; the output does not depend on it")
    trees: bool = switch(False, "return each verify step's draft tree and what was accepted")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return these parameters, with other defaults for those that were not given."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate({**defaults, **given}) if defaults else self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n > 1 and self.temperature == 0:
            raise contradiction(
                "n",
                f"{self.n} choices at temperature 0 would be the same text; "
                "raise temperature or leave n at 1.",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise contradiction("max_tokens", "0 generates nothing; give at least 1, or set prompt_logprobs.")
        if self.min_tokens > self.max_tokens:
            raise contradiction(
                "min_tokens",
                f"{self.min_tokens} exceeds max_tokens, {self.max_tokens}; lower it or raise max_tokens.",
            )
        return self
