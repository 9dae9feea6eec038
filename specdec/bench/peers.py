"""The peers of a benchmark: `transformers` in this process, and OpenAI-style servers by URL."""

import asyncio
import importlib.util
import inspect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch
from torch import Tensor

from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.bench.agreement import gaps
from specdec.bench.options import LLAMA_CPP
from specdec.bench.serve.stream import RequestTemplate, ServerUnderTest
from specdec.errors import ConfigError, EngineError
from specdec.http.client import ask_model, base_url, is_url, reason

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
        async with aiohttp.ClientSession(timeout=timeout) as session:
            if not self.model:
                self.model = await ask_model(session, self.name)
            request = RequestTemplate(
                model=self.model, chat=False, max_tokens=1 + new_tokens, temperature=0.0, ignore_eos=True
            )
            server = ServerUnderTest(session, self.name, request)
            start_s = time.perf_counter()
            asked = [BenchPrompt("", "", None, tuple(prompt)) for prompt in prompts]
            outcomes = await asyncio.gather(*(server.complete(own, 0, i) for i, own in enumerate(asked)))
        if failure := next((own.failure for own in outcomes if own.failure), None):
            raise ValueError(failure)
        steps = min(own.tokens for own in outcomes) - 1
        if steps < 1 or not all(own.chunk_s for own in outcomes):
            raise ValueError(f"an answer had {steps + 1} tokens where {1 + new_tokens} were asked for")
        prefill_s = max(own.chunk_s[0] for own in outcomes)
        step_s = (max(own.chunk_s[-1] for own in outcomes) - prefill_s) / steps
        return Sample(prefill_s - start_s, (step_s,), None)

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
