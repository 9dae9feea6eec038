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
"""Optional packages with which `transformers` runs recurrent layers."""

SERVER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one run of a batch: prefill of all prompts, then each decode step."""

    prefill_s: float
    step_s: tuple[float, ...]
    token_ids: tuple[tuple[int, ...], ...] | None
    """None: the contestant does not report its tokens."""
    tokens_per_step: float = 1.0
    """Mean tokens per row and step; above one with accepted drafts."""

    @property
    def token_s(self) -> float:
        """Return the mean step time divided by the tokens per row."""
        return sum(self.step_s) / len(self.step_s) / self.tokens_per_step


class Contestant(Protocol):
    name: str

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Prefill prompts of one length and decode 1 + `new_tokens` tokens each greedily, ignoring EOS."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts about this contestant to show beside its figures."""
        ...


class TransformersPeer:
    """Greedy decoding with a cache, one forward pass per step, without the overheads of `generate`."""

    name = "transformers"

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model, self.device = model.to(device).eval(), device
        # Renamed in transformers 5.24.
        self.cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Time the forward passes, including the choice of the token."""
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
        """Return the `gaps` of each row's chosen tokens, given the preceding text."""
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
    """A running server with streaming `/v1/completions`; its figures include HTTP and queueing."""

    def __init__(self, url: str) -> None:
        self.name = base_url(url)
        self.model = ""

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Send all prompts at once; the step time is the run's mean, as a stream may bundle tokens."""
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
        """Return the arrival times of the first and the last token, and the number of tokens."""
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
        """Return the server's model name."""
        return {"model": self.model, "tokens": "not compared"}


def refuse_unknown(names: Sequence[str]) -> None:
    """Refuse a peer that is neither a known name nor a URL, before anything is loaded."""
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
    """Turn names and URLs into contestants, in order; llama.cpp may be several."""
    known: dict[str, Sequence[Contestant]] = {LLAMA_CPP: llama_cpp}
    if transformers:
        known[transformers.name] = [transformers]
    return [peer for name in names for peer in (known[name] if name in known else [ServerPeer(name)])]
