"""The peers of a benchmark: `transformers` in this process, and OpenAI-style servers by URL."""

import asyncio
import importlib.util
import inspect
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
from torch import Tensor

from specdec.bench.agreement import gaps
from specdec.bench.options import LLAMA_CPP
from specdec.errors import ConfigError, EngineError
from specdec.http.client import DONE, ask_model, base_url, event_data, is_url, reason

FAST_PATHS = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages that `transformers` runs recurrent layers with, where it can import them."""

SERVER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a batch took: all prompts read, then each step that gave every row a token."""

    prefill_s: float
    step_s: tuple[float, ...]
    token_ids: tuple[tuple[int, ...], ...] | None
    """None: the contestant does not report its tokens."""
    tokens_per_step: float = 1.0
    """What a step gave each row on average; more than one where drafts were accepted."""

    @property
    def token_s(self) -> float:
        """Return the time of a step over the tokens that it gave each row."""
        return sum(self.step_s) / len(self.step_s) / self.tokens_per_step


class Contestant(Protocol):
    name: str

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Prefill prompts of one length and decode greedily by 1 + `new_tokens` tokens each, past any end."""
        ...

    def describe(self) -> dict[str, Any]:
        """Describe what must be known beside this contestant's figures."""
        ...


class TransformersPeer:
    """Greedy decoding with a cache, one forward pass a step, as `generate` does it without its overheads."""

    name = "transformers"

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model, self.device = model.to(device).eval(), device
        # transformers 5.24 has renamed it.
        self.cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Time the forward passes, the choice of the token included."""
        marks = [time.perf_counter()]
        token_BT, cache, chosen = torch.tensor(prompts, device=self.device), None, []
        for _ in range(1 + new_tokens):
            out = self.model(token_BT, **{self.cache: cache}, use_cache=True, logits_to_keep=1)
            token_BT, cache = out.logits[:, -1].argmax(-1, keepdim=True), out[self.cache]
            chosen.append(token_BT[:, 0].tolist())
            marks.append(time.perf_counter())
        took_s = [after - before for before, after in itertools.pairwise(marks)]
        return Sample(took_s[0], tuple(took_s[1:]), tuple(zip(*chosen, strict=True)))

    @torch.inference_mode()
    def judge(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Tensor:
        """Return the `gaps` of each row's chosen tokens, given the text before them."""
        found = []
        for prompt, output in zip(prompts, outputs, strict=True):
            token_1T = torch.tensor([[*prompt, *output[:-1]]], device=self.device)
            logits_TV = self.model(token_1T, use_cache=False, logits_to_keep=len(output)).logits[0]
            found.append(gaps(logits_TV, output))
        return torch.stack(found)

    def describe(self) -> dict[str, Any]:
        """Name the fast paths that `transformers` finds here."""
        found = [name for name in FAST_PATHS if importlib.util.find_spec(name)]
        return {"fast_paths": found, "note": f"fast paths that it found: {', '.join(found) or 'none'}"}


class ServerPeer:
    """A running server with a streaming `/v1/completions`; its figures include HTTP and its own queue."""

    def __init__(self, url: str) -> None:
        self.name = base_url(url)
        self.model = ""

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Send all prompts at once; a step's time is the run's mean, for a stream may bundle tokens."""
        try:
            return asyncio.run(self._run(prompts, new_tokens))
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"--peers: the server at {self.name} did not serve the benchmark ({reason(error)}); check "
                "that it runs and answers GET /v1/models, and POST /v1/completions with stream=true and a "
                "prompt of token ids",
                field="peers",
            ) from error

    async def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        timeout = aiohttp.ClientTimeout(total=SERVER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            if not self.model:
                self.model = await ask_model(session, self.name)
            start_s = time.perf_counter()
            streams = [self._complete(session, prompt, 1 + new_tokens) for prompt in prompts]
            marks = await asyncio.gather(*streams)
        prefill_s = max(first for first, _, _ in marks)
        steps = min(count for _, _, count in marks) - 1
        if steps < 1:
            raise ValueError(f"an answer had {steps + 1} tokens where {1 + new_tokens} were asked for")
        step_s = (max(last for _, last, _ in marks) - prefill_s) / steps
        return Sample(prefill_s - start_s, (step_s,), None)

    async def _complete(
        self, session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int
    ) -> tuple[float, float, int]:
        """Return when the first and the last token came, and how many there were."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s = last_s = 0.0
        chunks, counted = 0, 0
        async with session.post(f"{self.name}/v1/completions", json=body) as reply:
            async for data in event_data(reply):
                if data == DONE:
                    break
                event = json.loads(data)
                if event.get("choices"):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                    chunks += 1
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
        return first_s, last_s, counted or chunks

    def describe(self) -> dict[str, Any]:
        """Name the model that the server says it serves."""
        return {"model": self.model, "tokens": "not compared"}


def refuse_unknown(names: Sequence[str]) -> None:
    """Refuse a peer that is neither known by name nor a URL, before anything is loaded."""
    for name in names:
        if name not in ("transformers", LLAMA_CPP) and not is_url(name):
            raise ConfigError(
                f"--peers: {name!r} is not 'transformers', '{LLAMA_CPP}' or the URL of a server; give one "
                "such as http://localhost:8000",
                field="peers",
            )


def connect(
    names: Sequence[str], transformers: TransformersPeer | None, llama_cpp: Sequence[Contestant] = ()
) -> list[Contestant]:
    """Turn names and URLs into contestants, in the order given; llama.cpp may be several."""
    known: dict[str, Sequence[Contestant]] = {LLAMA_CPP: llama_cpp}
    if transformers:
        known[transformers.name] = [transformers]
    return [peer for name in names for peer in (known[name] if name in known else [ServerPeer(name)])]
