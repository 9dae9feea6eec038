"""Validated sampling terms, checked once per request and shared by its prompts and choices."""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.thinking import ThinkingRule
from specdec.errors import RequestError
from specdec.text.grammar.guide import CompiledGrammar
from specdec.text.tokenizer import Tokenizer
from specdec.verify.limits import AllowedTokens, BadWords, MinTokens, TokenLimit

MAX_WORD_TOKENS = 128
"""Maximum tokens of a bad word: each token compares the output's end with every length."""


class ValidatedParams(NamedTuple):
    """Validated parameters. Shared by prompts and choices, and never mutated."""

    params: SamplingParams
    grammar: CompiledGrammar | None = None
    """Compiled grammar of a structured output."""
    tenant: Tenant = SOLE
    stop_ids: Mapping[int, int | None] = {}
    """End tokens with their `stop_reason`; the model's own have None."""
    limits: tuple[TokenLimit, ...] = ()
    """Limits in their initial state; their tables are shared."""

    thinking: ThinkingRule | None = None

    def begin_limits(self, grammar: TokenLimit | None = None) -> list[TokenLimit]:
        """Return one choice's limits: thinking and grammar first."""
        first = self.thinking.begin(grammar) if self.thinking else grammar
        return [*([first] if first else []), *(copy.copy(limit) for limit in self.limits)]


class PreparedPrompt(NamedTuple):
    """A validated prompt with its terms."""

    ids: tuple[int, ...]
    terms: ValidatedParams

    @property
    def params(self) -> SamplingParams:
        return self.terms.params

    @property
    def grammar(self) -> CompiledGrammar | None:
        return self.terms.grammar


def find_stops(params: SamplingParams, eos: Collection[int]) -> dict[int, int | None]:
    """Return the end tokens; one that is also the model's own has no reason."""
    stop_ids = {token: token for token in params.stop_token_ids or ()}
    return {**stop_ids, **({} if params.ignore_eos else dict.fromkeys(eos))}


def make_limits(
    params: SamplingParams,
    stop_ids: Collection[int],
    tokenizer: Tokenizer | None,
    vocab: int,
    *,
    has_grammar: bool,
) -> tuple[TokenLimit, ...]:
    """Return the limits besides the grammar; earlier ones take precedence."""
    limits: list[TokenLimit] = []
    if params.allowed_token_ids:
        limits.append(AllowedTokens(params.allowed_token_ids, vocab))
    if banned := _spelled(params.bad_words or (), tokenizer, vocab):
        limits.append(BadWords(banned, vocab))
    if params.min_tokens and stop_ids:
        limits.append(MinTokens(stop_ids, params.min_tokens, vocab, yields=has_grammar))
    return tuple(limits)


def check_ids(params: SamplingParams, tokenizer: Tokenizer | None, vocab: int) -> None:
    """Raise for token ids outside the vocabulary, and for texts without a tokenizer."""
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        tokens = getattr(params, field)
        if tokens and not 0 <= (token := max(tokens)) < vocab:
            raise RequestError(
                f"{field}: token id {token} is outside the vocabulary; use 0 to {vocab - 1}.", field=field
            )
    for field, instead in (("stop", "use stop_token_ids"), ("bad_words", "use logit_bias")):
        if getattr(params, field) and tokenizer is None:
            raise RequestError(
                f"{field}: the model's folder has no tokenizer.json to make text with; {instead}.",
                field=field,
            )


def _spelled(words: Sequence[str], tokenizer: Tokenizer | None, vocab: int) -> frozenset[tuple[int, ...]]:
    """Return the token sequences of words, in each spelling the model can generate."""
    spellings = {ids for word in words for ids in (tokenizer.spellings(word) if tokenizer else ())}
    if (longest := max(map(len, spellings), default=0)) > MAX_WORD_TOKENS:
        raise RequestError(
            f"bad_words: one has {longest} tokens and may have {MAX_WORD_TOKENS}; give shorter ones.",
            field="bad_words",
        )
    return frozenset(ids for ids in spellings if max(ids) < vocab)
