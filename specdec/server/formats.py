"""Choices as JSON: completions or chats, whole or in chunks."""

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, Self

from specdec.core.outputs import Delta, DraftTree, RequestStats, TokenLogprob
from specdec.core.params import PreparedPrompt
from specdec.engine.prompts import Prompt
from specdec.server.chat_answer import ChatAnswer
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure
from specdec.server.thinking import ThinkingTokens
from specdec.text.tokenizer import Tokenizer

Json = dict[str, Any]
AT_ONCE = 64
"""List elements encoded at once; with 20 alternatives each some 100 KB."""
UTF8 = codecs.getincrementaldecoder("utf-8")


class LazyJsonList:
    """A JSON list whose elements, which take much memory, are built while writing."""

    def __init__(self, rows: Sequence[Any], convert: Callable[[Any], Any]) -> None:
        self._rows, self._make = rows, convert

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._rows)


def written(value: Any) -> Iterator[str]:
    """Yield JSON in pieces, long lists a few elements at a time."""
    if isinstance(value, LazyJsonList):
        rows, comma = iter(value), "["
        while batch := list(islice(rows, AT_ONCE)):
            yield comma + json.dumps(batch)[1:-1]
            comma = ", "
        yield "]" if comma == ", " else "[]"
    elif isinstance(value, dict):
        comma = "{"
        for name, item in value.items():
            yield f"{comma}{json.dumps(name)}: "
            yield from written(item)
            comma = ", "
        yield "}" if value else "{}"
    else:
        yield json.dumps(value)


@dataclass(slots=True)
class Usage:
    """A request's usage so far."""

    prompt_tokens: int
    n: int = 1
    completion_tokens: int = 0
    accepted: int = 0
    """Output tokens that came from drafts."""
    ended: list[RequestStats] = field(default_factory=list)

    cached: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt found in the prefix cache by its first choice."""
    thinking: ThinkingTokens | None = None
    """Counter of thinking tokens, if there is thinking."""

    @classmethod
    def of(cls, prepared: Sequence[PreparedPrompt]) -> Self:
        return cls(sum(len(prompt.ids) for prompt in prepared), prepared[0].params.n)

    def add(self, choice: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if self.thinking:
            self.thinking.add(choice, delta.token_ids)
        self.accepted += sum(origin > 0 for origin in delta.origins)
        if delta.stats:
            self.ended.append(delta.stats)
            prompt, tokens = choice // self.n, delta.stats.cached_tokens
            self.cached[prompt] = min(self.cached.get(prompt, tokens), tokens)

    def as_json(self) -> Json:
        drafted = sum(stats.drafted for stats in self.ended)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": max(drafted - self.accepted, 0),
                "accepted_from_outputs": sum(stats.accepted_from_outputs for stats in self.ended),
                "reasoning_tokens": self.thinking.total if self.thinking else 0,
                "audio_tokens": 0,
            },
        }

    def metrics(self) -> Json:
        """Return the speculation metrics of these choices."""
        steps = sum(stats.steps for stats in self.ended)
        histogram: dict[int, int] = {}
        for stats in self.ended:
            for accepted, count in stats.histogram.items():
                histogram[accepted] = histogram.get(accepted, 0) + count
        speculative = {
            "steps": steps,
            "drafted_tokens": sum(stats.drafted for stats in self.ended),
            "accepted_tokens": sum(stats.accepted for stats in self.ended),
            "acceptance_length": sum(stats.verified_tokens for stats in self.ended) / steps if steps else 1.0,
            "steps_by_accepted": {str(accepted): histogram[accepted] for accepted in sorted(histogram)},
            "acceptance_by_depth": [list(stats.per_depth) for stats in self.ended],
        }
        return {
            "speculative_decoding": speculative,
            "time_to_first_token_s": min((stats.first_token_s for stats in self.ended), default=0.0),
            "total_s": max((stats.total_s for stats in self.ended), default=0.0),
        }


@dataclass(frozen=True, slots=True)
class ShownFields:
    """Optional response fields."""

    token_ids: bool = False
    origins: bool = False
    drafts: bool = False
    prompt_logprobs: bool = False


class AnswerWriter(Protocol):
    """Writes one response in its API's format, whole or as events."""

    usage: Usage
    is_typed: bool
    """Whether events are named by their `type`; others end with `[DONE]`."""

    def whole(self, outputs: Mapping[int, Delta]) -> Iterator[str]:
        """Yield the whole response in pieces, from each choice's output."""
        ...

    def events(self, choice: int, delta: Delta) -> list[Json]:
        """Return the stream events of a choice's next delta."""
        ...

    def end(self) -> list[Json]:
        """Return the last events of the stream."""
        ...

    def failed(self, failure: Failure) -> list[Json]:
        """Return the events that end a failed stream."""
        ...


class AnswerFormat(Protocol):
    shown: ShownFields
    prefix: str
    """Prefix of ids."""
    whole: str
    chunk: str
    """The `object` names."""

    def first(self, choice: int) -> Json | None:
        """Return the chunk that opens a choice's stream, if any."""
        ...

    def said(self, choice: int, delta: Delta) -> Json:
        """Return a whole choice."""
        ...

    def parts(self, choice: int, delta: Delta) -> list[Json]:
        """Return the next chunks of a choice, if any."""
        ...


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt to repeat before its completion."""

    text: str
    first: int
    """Its first token, which has no log-probability."""

    @classmethod
    def of(cls, prompt: Prompt, prepared: PreparedPrompt, tokenizer: Tokenizer | None) -> Self:
        if isinstance(prompt, str):
            return cls(prompt, prepared.ids[0])
        return cls("".join(spell(tokenizer, token) for token in prepared.ids), prepared.ids[0])


class CompletionFormat:
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, tokenizer: Tokenizer | None, shown: ShownFields, echoes: Sequence[PromptEcho] = (), n: int = 1
    ) -> None:
        self.tokenizer, self.shown, self.echoes, self.n = tokenizer, shown, echoes, n
        self._offsets: dict[int, int] = {}
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._begun: set[int] = set()

    def first(self, choice: int) -> Json | None:
        return None

    def parts(self, choice: int, delta: Delta) -> list[Json]:
        return [self.said(choice, delta)] if _has_output(delta) else []

    def said(self, choice: int, delta: Delta) -> Json:
        echo = self.echoes[choice // self.n] if self.echoes and choice not in self._begun else None
        self._begun.add(choice)
        logprobs = None if delta.logprobs is None else self._logprobs(choice, delta, echo)
        return {
            "index": choice,
            "text": echo.text + delta.text if echo else delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **beside(delta, self.shown, self.tokenizer),
        }

    def _logprobs(self, choice: int, delta: Delta, echo: PromptEcho | None) -> Json:
        """Return log-probabilities as columns, the prompt's first; offsets count characters of text."""
        prompts = filter(None, delta.prompt_logprobs or ())
        logprobs = [*prompts, *(delta.logprobs or ())]
        first = [echo.first] if echo else []
        ids = [*first, *(logprob.token_id for logprob in logprobs)]
        tokens, offsets = [self._token_text(token) for token in ids], []
        decoder = self._decoders.setdefault(choice, UTF8("replace"))
        for token in ids:
            offsets.append(self._offsets.get(choice, 0))
            self._offsets[choice] = offsets[-1] + len(decoder.decode(self._bytes(token)))
        return {
            "text_offset": offsets,
            "token_logprobs": [*(None for _ in first), *(logprob.logprob for logprob in logprobs)],
            "tokens": tokens,
            "top_logprobs": LazyJsonList([*(None for _ in first), *logprobs], self._top),
        }

    def _top(self, chosen: TokenLogprob | None) -> Json | None:
        if chosen is None:
            return None
        return {self._token_text(token): logprob for token, logprob in reversed(_with_chosen(chosen))}

    def _bytes(self, token: int) -> bytes:
        return self.tokenizer.bytes_of(token) if self.tokenizer else spell(None, token).encode()

    def _token_text(self, token: int) -> str:
        """Return a token's text, or its bytes in OpenAI's notation if it is part of a character."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatFormat:
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None, shown: ShownFields, expected: ExpectedContent) -> None:
        self.tokenizer, self.shown, self.expected = tokenizer, shown, expected
        self._answers: dict[int, ChatAnswer] = {}
        self._token_cache: dict[int, tuple[str, list[int]]] = {}
        """Text and bytes of tokens already written in log-probabilities."""

    def first(self, choice: int) -> Json | None:
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def said(self, choice: int, delta: Delta) -> Json:
        return self._choice_json(choice, "message", self._answer(choice).message(delta), delta)

    def parts(self, choice: int, delta: Delta) -> list[Json]:
        """Return one chunk per message part; the other fields go into the last."""
        messages = self._answer(choice).parts(delta)
        if not messages and not (
            delta.finish_reason or delta.logprobs or beside(delta, self.shown, self.tokenizer)
        ):
            return []
        *earlier, last = messages or [{}]
        chunks = [self._choice(choice, "delta", message, None, None) for message in earlier]
        return [*chunks, self._choice_json(choice, "delta", last, delta)]

    def _answer(self, choice: int) -> ChatAnswer:
        if choice not in self._answers:
            self._answers[choice] = ChatAnswer(self.expected)
        return self._answers[choice]

    def _choice_json(self, choice: int, name: str, message: Json, delta: Delta) -> Json:
        logprobs, reason = None, delta.finish_reason
        if delta.logprobs is not None:
            logprobs = {"content": LazyJsonList(delta.logprobs, self._logprob), "refusal": None}
        choice_json = self._choice(
            choice, name, message, logprobs, self._answer(choice).finish_reason(reason)
        )
        return choice_json | {"stop_reason": delta.stop_reason} | beside(delta, self.shown, self.tokenizer)

    def _choice(
        self, index: int, name: str, message: Json, logprobs: Json | None, finish_reason: str | None
    ) -> Json:
        return {"index": index, name: message, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprob(self, chosen: TokenLogprob) -> Json:
        top = [self._token(token, logprob) for token, logprob in chosen.top]
        return self._token(chosen.token_id, chosen.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        if token not in self._token_cache:
            text = spell(self.tokenizer, token)
            data = self.tokenizer.bytes_of(token) if self.tokenizer else text.encode()
            self._token_cache[token] = text, list(data)
        text, byte_values = self._token_cache[token]
        return {"token": text, "logprob": logprob, "bytes": byte_values}


def _has_output(delta: Delta) -> bool:
    return bool(delta.text or delta.token_ids or delta.finish_reason)


def beside(delta: Delta, shown: ShownFields, tokenizer: Tokenizer | None) -> Json:
    """Return requested fields next to the text."""
    fields: Json = {}
    if shown.token_ids:
        fields["token_ids"] = list(delta.token_ids)
    if shown.origins:
        fields["origins"] = list(delta.origins)
        fields["pieces"] = [list(piece) for piece in delta.pieces]
    if shown.drafts:
        fields["drafts"] = [_draft(draft, tokenizer) for draft in delta.drafts]
    if shown.prompt_logprobs and delta.prompt_logprobs is not None:
        fields["prompt_logprobs"] = LazyJsonList(
            delta.prompt_logprobs, lambda logprob: logprob and _ranked(logprob, tokenizer)
        )
    return fields


def _ranked(chosen: TokenLogprob, tokenizer: Tokenizer | None) -> Json:
    """Return a prompt token's alternatives in vLLM's format; only the likeliest have a known rank."""
    ranks = {token: rank for rank, (token, _) in enumerate(chosen.top, 1)}
    return {
        str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": spell(tokenizer, token)}
        for token, logprob in _with_chosen(chosen)
    }


def _draft(draft: DraftTree, tokenizer: Tokenizer | None) -> Json:
    """Return a draft tree that a page can draw without a tokenizer."""
    bonus = draft.bonus
    return {
        "token_ids": list(draft.tokens),
        "texts": [spell(tokenizer, token) for token in draft.tokens],
        "parents": list(draft.parents),
        "accepted": list(draft.accepted),
        "bonus": None if bonus is None else {"token_id": bonus, "text": spell(tokenizer, bonus)},
    }


def spell(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text, including special tokens."""
    return tokenizer.spell(token) if tokenizer else f"token_id:{token}"


def _with_chosen(chosen: TokenLogprob) -> list[tuple[int, float]]:
    """Append the chosen token to the top ones, if it is not among them."""
    is_listed = any(token == chosen.token_id for token, _ in chosen.top)
    return [*chosen.top] if is_listed else [*chosen.top, (chosen.token_id, chosen.logprob)]
