"""Compare log-probabilities with llama.cpp's: `python -m tests.models.compare_llama_cpp FILE.gguf`.

llama.cpp continues some prompts, greedily and then by sampling at temperature 1, and specdec scores the same
tokens. Greedy output shows how often both choose the same token. On sampled output the mean difference
estimates the KL divergence, and both perplexities are reported. Needs xllamacpp, or llama-server on the PATH.
With --text specdec also scores a text as llama-perplexity does by default.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specdec import SamplingParams, SpecEngine
from specdec.bench.llama_cpp import LlamaCppPeer, ServerSettings, find_program

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a lighthouse keeper who",
    "To make tomato soup, first",
    "The water cycle describes how",
    "Dear colleague,\n\nI am writing to",
    "The Roman Empire began when",
    "A bicycle stays upright because",
    "1. Regular exercise",
    "import json\nimport sys\n\n\nclass",
)
GREEDY: Mapping[str, Any] = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
SAMPLED: Mapping[str, Any] = {"temperature": 1.0, "samplers": ["temperature"], "seed": 1}
WINDOW = 512
"""llama-perplexity's context: it scores the second half of each window."""


class Text(NamedTuple):
    """A prompt, llama.cpp's output for it, and its log-probabilities."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def write(peer: LlamaCppPeer, sampling: Mapping[str, Any], tokens: int) -> list[Text]:
    found = []
    for prompt in PROMPTS:
        prompt_ids = peer.ask("/tokenize", {"content": prompt, "add_special": True})["tokens"]
        asked = {"prompt": prompt_ids, "n_predict": tokens, "n_probs": 1, "cache_prompt": False, **sampling}
        reply = peer.ask("/completion", asked)["completion_probabilities"]
        found.append(Text(prompt_ids, [own["id"] for own in reply], [own["logprob"] for own in reply]))
    return found


def compare(name: str, engine: SpecEngine, texts: Sequence[Text]) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    scored = engine.generate([[*own.prompt_ids, *own.token_ids] for own in texts], params)
    own, peer, agree = list[float](), list[float](), list[bool]()
    for text, completion in zip(texts, scored, strict=True):
        assert completion.prompt_logprobs is not None
        for found in completion.prompt_logprobs[len(text.prompt_ids) :]:
            assert found is not None
            own.append(found.logprob)
            agree.append(found.top[0][0] == found.token_id)
        peer += text.logprobs
    differences = [b - a for a, b in zip(own, peer, strict=True)]
    print(
        f"{name}: {len(own)} tokens, {fmean(agree):.2%} the likeliest; log-probabilities: mean difference "
        f"{fmean(differences):+.4f}, absolute {fmean(map(abs, differences)):.4f}; perplexity "
        f"{math.exp(-fmean(own)):.4f}, llama.cpp's {math.exp(-fmean(peer)):.4f}",
        flush=True,
    )


def perplexity(engine: SpecEngine, text: str) -> None:
    assert engine.tokenizer
    begin, ids = engine.tokenizer.encode(""), engine.tokenizer.encode(text)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    prompts = [[*begin, *own[len(begin) :]] for own in windows]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    own = list[float]()
    for completion in engine.generate(prompts, params):
        assert completion.prompt_logprobs is not None
        own += [found.logprob for found in completion.prompt_logprobs[WINDOW // 2 + 1 :] if found]
    print(f"text: {len(windows)} windows, perplexity {math.exp(-fmean(own)):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=200, help="per prompt, of which there are ten")
    parser.add_argument("--cache", default="f16", help="type of llama.cpp's KV cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="of specdec's activations")
    parser.add_argument("--ignore-eos", action="store_true", help="continue past the end of a response")
    parser.add_argument("--text", type=Path, help="held-out text of at least 512 tokens")
    own = parser.parse_args()
    context, more = own.tokens + 256, {"ignore_eos": own.ignore_eos}
    settings = ServerSettings(
        *(find_program(None), str(own.file), "F32", own.threads, 1, context, 512, own.cache)
    )
    peer = LlamaCppPeer(settings)
    try:
        greedy, sampled = (write(peer, {**kind, **more}, own.tokens) for kind in (GREEDY, SAMPLED))
    finally:
        peer.close()
    length = max(context, WINDOW + 1)
    with SpecEngine(str(own.file), dtype=own.dtype, draft="none", max_model_len=length) as engine:
        compare("greedy ", engine, greedy)
        compare("sampled", engine, sampled)
        if own.text:
            perplexity(engine, own.text.read_text())


if __name__ == "__main__":
    main()
