"""Output of `generate`: streamed text, draft tokens in colour, figures at the end.

An interrupt still prints the output so far.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from specdec.cli.text import ACCEPTED, PLAIN, paints, visible
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.core.outputs import Completion, Delta, RequestStats
from specdec.engine.engine import SpecEngine
from specdec.text.generation_config import sampling_defaults
from specdec.text.tokenizer import TextPiece

LEGEND = f"{ACCEPTED}In this colour{PLAIN}: accepted from the draft. The rest is the verifier's own choice."

Prompt = str | list[int]


def generate(
    model: str | Path,
    config: EngineConfig,
    prompt: Prompt,
    params: SamplingParams,
    *,
    whole: bool,
    as_json: bool,
    colour: str,
) -> None:
    """Complete a prompt: streamed, or with `whole` each choice once all have ended."""
    params = params.with_defaults(sampling_defaults(Path(model)))
    with SpecEngine(model, config) as engine:
        engine.warm_up()
        if whole:
            print_choices(engine, prompt, params, as_json=as_json, colour=colour)
        else:
            stream_text(engine, prompt, params, colour=colour)


def stream_text(engine: SpecEngine, prompt: Prompt, params: SamplingParams, *, colour: str = "auto") -> None:
    """Stream a completion to stdout, and print its figures on stderr at the end."""
    coloured, progress = paints(colour), StreamProgress()
    try:
        stats = asyncio.run(_print_deltas(engine, prompt, params, progress, coloured=coloured))
    except KeyboardInterrupt:
        if progress.output_tokens:
            print(progress.figures(len(_prompt_ids(engine, prompt))), file=sys.stderr)
        raise
    if stats is not None:
        if coloured and stats.accepted:
            print(f"\n{LEGEND}", end="", file=sys.stderr)
        print(f"\n{figures(stats, engine.model.settings.drafters)}", file=sys.stderr)


class StreamProgress:
    """Count and time a stream's tokens: an interrupted request has no statistics."""

    def __init__(self) -> None:
        self.output_tokens = self.accepted = 0
        self._start_s = self._first_s = self._last_s = time.perf_counter()

    def add(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        if not delta.token_ids:
            return
        self._last_s = time.perf_counter()
        if not self.output_tokens:
            self._first_s = self._last_s
        self.output_tokens += len(delta.token_ids)
        self.accepted += sum(origin > 0 for origin in delta.origins)

    def figures(self, prompt_tokens: int) -> str:
        """Describe the stream up to its last delta."""
        first_token_s, total_s = self._first_s - self._start_s, self._last_s - self._start_s
        line = _timings(prompt_tokens, self.output_tokens, first_token_s, total_s)
        return f"{line}\ninterrupted: {self.accepted} of these tokens were accepted from drafts"


def print_choices(
    engine: SpecEngine, prompt: Prompt, params: SamplingParams, *, as_json: bool, colour: str = "auto"
) -> None:
    """Print every choice once all have ended; Ctrl-C prints the choices so far."""
    deltas: list[list[Delta]] = [[] for _ in range(params.n)]
    coloured = paints(colour)
    try:
        asyncio.run(_hear(engine, prompt, params, deltas))
    except KeyboardInterrupt:
        _print_heard(engine, prompt, deltas, as_json=as_json, coloured=coloured)
        raise
    _print_heard(engine, prompt, deltas, as_json=as_json, coloured=coloured)


def painted(pieces: Iterable[TextPiece], *, coloured: bool) -> str:
    """Return pieces for a terminal, accepted draft tokens in colour."""
    output, accepted = [], False
    for text, origin in pieces:
        if coloured and accepted != (origin > 0):
            accepted = origin > 0
            output.append(ACCEPTED if accepted else PLAIN)
        output.append(visible(text))
    # Each piece resets its colour, so that later output is plain even after an interrupt.
    return "".join([*output, PLAIN] if accepted else output)


def figures(stats: RequestStats, drafters: tuple[str, ...]) -> str:
    """Describe a completion's speed and speculation."""
    line = _timings(stats.prompt_tokens, stats.output_tokens, stats.first_token_s, stats.total_s)
    if stats.drafted:
        return f"{line}\n{_earned(stats)}"
    if drafters:
        names = ", ".join(drafters)
        return f"{line}\nno drafts in {stats.steps} steps ({names}): none found, or none that would be faster"
    return line


def _timings(prompt_tokens: int, output_tokens: int, first_token_s: float, total_s: float) -> str:
    decode_s = total_s - first_token_s
    rate = f", then {(output_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else ""
    return (
        f"{prompt_tokens} prompt tokens, {output_tokens} generated in {total_s:.2f} s: "
        f"TTFT {first_token_s * 1e3:.0f} ms{rate}"
    )


def _earned(stats: RequestStats) -> str:
    """Describe the gains and costs of drafts."""
    depths = " ".join(f"{share:.0%}" for share in stats.per_depth)
    spent = ", ".join(
        f"{phase} {took_s / stats.steps * 1e3:.2f}" for phase, took_s in stats.seconds.items() if took_s
    )
    from_outputs = f", {stats.accepted_from_outputs} of them found in earlier outputs"
    return (
        f"{'synthetic ' if stats.synthetic else ''}acceptance length {stats.acceptance_length:.2f}: "
        f"{stats.accepted} of {stats.drafted} draft tokens accepted in {stats.steps} steps"
        f"{from_outputs if stats.accepted_from_outputs else ''}, by depth {depths}; "
        f"ms per step: {spent}"
    )


async def _print_deltas(
    engine: SpecEngine, prompt: Prompt, params: SamplingParams, progress: StreamProgress, *, coloured: bool
) -> RequestStats | None:
    stats, is_started = None, False
    try:
        async for delta in engine.stream(prompt, params):
            is_started = True
            progress.add(delta)
            print(painted(_pieces(engine, delta), coloured=coloured), end="", flush=True)
            stats = delta.stats
    except asyncio.CancelledError:
        is_started = True
        raise
    finally:
        if is_started:  # the following error or shell prompt starts a new line
            print(flush=True)
    return stats


async def _hear(
    engine: SpecEngine, prompt: Prompt, params: SamplingParams, deltas: list[list[Delta]]
) -> None:
    """Collect each choice's deltas into `deltas`."""
    async for delta in engine.stream(prompt, params):
        deltas[delta.index].append(delta)


def _print_heard(
    engine: SpecEngine, prompt: Prompt, choices: list[list[Delta]], *, as_json: bool, coloured: bool
) -> None:
    ids = _prompt_ids(engine, prompt)
    for index, deltas in enumerate(choices):
        if as_json:
            print(_as_json(Completion.of(ids, index, deltas), is_last=_ended(deltas)))
        else:
            pieces = [piece for delta in deltas for piece in _pieces(engine, delta)]
            print(f"[{index}] {painted(pieces, coloured=coloured)}")
    sys.stdout.flush()


def _prompt_ids(engine: SpecEngine, prompt: Prompt) -> list[int]:
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) and engine.tokenizer else prompt
    return [int(i) for i in ids]


def _pieces(engine: SpecEngine, delta: Delta) -> Iterable[TextPiece]:
    """Return a delta's pieces; without a tokenizer, its ids."""
    if engine.tokenizer:
        return delta.pieces
    return [
        TextPiece(f"{token} ", origin) for token, origin in zip(delta.token_ids, delta.origins, strict=True)
    ]


def _ended(deltas: list[Delta]) -> bool:
    """Return whether a choice has finished: its last delta carries the statistics."""
    return bool(deltas) and deltas[-1].stats is not None


def _as_json(completion: Completion, *, is_last: bool) -> str:
    """Serialise a completion as one line, without statistics if it was interrupted."""
    fields = dataclasses.asdict(completion)
    if is_last:
        fields["stats"]["acceptance_length"] = completion.stats.acceptance_length
    else:
        fields["stats"] = None
    return json.dumps(fields, ensure_ascii=False)
