"""Compare next-token choices and log-probabilities with llama.cpp's on a GGUF file.

    python -m tests.models.compare_llama_cpp FILE.gguf

llama.cpp continues ten prompts greedily. llama.cpp, specdec and an exact model then score the same tokens,
and those of a held-out text. The exact model is specdec in float32 with dequantised weights. The other two
round activations to 8 bits, each in its own way: where they disagree, it shows whose rounding changed the
choice. Needs `specdec[bench]`: the package xllamacpp, or llama-server on PATH.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from specdec import SamplingParams, SpecEngine
from specdec.bench.acceptance.prompts import bundled
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
QUESTION = "The capital of France is"
ANSWER_TOKENS = 24
GREEDY: Mapping[str, Any] = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "n_probs": 1}
WINDOW = 512
"""Context size for a text; as in llama-perplexity, the second half of each window is scored."""
FORCED = 1e9
"""Logit bias that makes greedy sampling choose a token. Log-probabilities are computed without biases."""
EXACT: Mapping[str, Any] = {"kernels": "cpu", "dtype": "float32"}


class Peer(Protocol):
    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post a request to llama.cpp's server."""
        ...


class ScoredTokens(NamedTuple):
    """Tokens that one model scored: its log-probability of each, and its own choice there."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-fmean(self.logprobs))


class Text(NamedTuple):
    """Token ids, scored from the token `first` on."""

    token_ids: Sequence[int]
    first: int


def greedy_texts(peer: Peer, tokens: int) -> tuple[list[Text], ScoredTokens]:
    """Continue the prompts with llama.cpp beyond EOS, and return its scores of its own output."""
    texts, scores = [], ScoredTokens([], [])
    for prompt in PROMPTS:
        prompt_ids = peer.ask("/tokenize", {"content": prompt, "add_special": True})["tokens"]
        asked = {"prompt": prompt_ids, "n_predict": tokens, "cache_prompt": False, "ignore_eos": True}
        written = _append(scores, peer.ask("/completion", {**asked, **GREEDY}))
        texts.append(Text([*prompt_ids, *written], len(prompt_ids)))
    return texts, scores


def windows(peer: Peer, text: str, tokens: int) -> list[Text]:
    """Cut a text to windows with `tokens` to score; each begins as llama.cpp begins a text."""
    begin = peer.ask("/tokenize", {"content": "", "add_special": True})["tokens"]
    ids = peer.ask("/tokenize", {"content": text, "add_special": False})["tokens"]
    width, count = WINDOW - len(begin), -(-tokens // (WINDOW // 2))
    cuts = [ids[i * width : (i + 1) * width] for i in range(count)]
    return [Text([*begin, *own], WINDOW // 2) for own in cuts if len(own) == width]


def force(peer: Peer, texts: Sequence[Text]) -> ScoredTokens:
    """Score given tokens with llama.cpp, one request each: its server scores only tokens that it writes."""
    scores = ScoredTokens([], [])
    for text in texts:
        for i in range(text.first, len(text.token_ids)):
            bias = [[text.token_ids[i], FORCED]]
            asked = {"prompt": text.token_ids[:i], "n_predict": 1, "cache_prompt": True, "logit_bias": bias}
            written = _append(scores, peer.ask("/completion", {**asked, **GREEDY}))
            assert written == [text.token_ids[i]], "llama.cpp did not write the token it was given"
    return scores


def _append(scores: ScoredTokens, reply: Mapping[str, Any]) -> list[int]:
    """Append a reply's scores; return its tokens."""
    found = reply["completion_probabilities"]
    scores.logprobs.extend(own["logprob"] for own in found)
    scores.best.extend(own["top_logprobs"][0]["id"] for own in found)
    return [own["id"] for own in found]


def score(engine: SpecEngine, texts: Sequence[Text]) -> ScoredTokens:
    """Score the same tokens with specdec, in one pass."""
    scores = ScoredTokens([], [])
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    prompts = [list(text.token_ids) for text in texts]
    for text, completion in zip(texts, engine.generate(prompts, params), strict=True):
        assert completion.prompt_logprobs is not None
        for found in completion.prompt_logprobs[text.first :]:
            assert found is not None
            scores.logprobs.append(found.logprob)
            scores.best.append(found.top[0][0])
    return scores


def compare(peer: ScoredTokens, own: ScoredTokens, exact: ScoredTokens) -> Iterator[str]:
    """Yield the lines of a report on the same tokens scored by llama.cpp, specdec and the exact model."""
    yield f"  perplexity: llama.cpp {peer.perplexity:.4f}, " + ", ".join(
        f"{name} {found.perplexity:.4f} ({found.perplexity / peer.perplexity - 1:+.2%})"
        for name, found in (("specdec", own), ("exact", exact))
    )
    pairs = {
        "specdec, llama.cpp": (own, peer),
        "llama.cpp, exact": (peer, exact),
        "specdec, exact": (own, exact),
    }
    for name, (first, second) in pairs.items():
        gaps = [a - b for a, b in zip(first.logprobs, second.logprobs, strict=True)]
        agree = fmean(a == b for a, b in zip(first.best, second.best, strict=True))
        yield (
            f"  {name + ':':20} same choice {agree:.2%}; log-probabilities: mean difference "
            f"{fmean(gaps):+.4f}, absolute {fmean(map(abs, gaps)):.4f}"
        )
    rows = [row for row in zip(own.best, peer.best, exact.best, strict=True) if row[0] != row[1]]
    ours, theirs = (sum(row[i] == row[2] for row in rows) for i in (0, 1))
    yield (
        f"  at the {len(rows)} tokens where specdec and llama.cpp differ, the exact model agrees "
        f"with specdec at {ours}, with llama.cpp at {theirs}, with neither at {len(rows) - ours - theirs}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=2000, help="of greedy output, and of the text")
    parser.add_argument("--text", type=Path, help="held-out text (default: the mixed prompts that ship)")
    parser.add_argument("--cache", default="f16", help="type of llama.cpp's KV cache")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    parser.add_argument("--dtype", default="auto", help="of specdec's activations")
    given = parser.parse_args()
    each = -(-given.tokens // len(PROMPTS))
    text = given.text.read_text() if given.text else "\n\n".join(own.text or "" for own in bundled(["mixed"]))
    context = max(each + 256, WINDOW + 1)
    settings = ServerSettings(
        *(find_program(None), str(given.file), "F32", given.threads, 1, context, 512, given.cache)
    )
    with closing(LlamaCppPeer(settings)) as peer:
        greedy, of_greedy = greedy_texts(peer, each)
        held_out = windows(peer, text, given.tokens)
        peers = [of_greedy, force(peer, held_out)]
        chat = peer.ask("/apply-template", {"messages": [{"role": "user", "content": QUESTION}]})["prompt"]
        chat_ids = peer.ask("/tokenize", {"content": chat, "parse_special": True})["tokens"]
        asked = {"prompt": chat_ids, "n_predict": ANSWER_TOKENS, **GREEDY}
        answers = {"llama.cpp": peer.ask("/completion", asked)["content"]}
    found = {}
    for name, more in {"specdec": {"dtype": given.dtype}, "exact": EXACT}.items():
        with SpecEngine(str(given.file), draft="none", max_model_len=context, **more) as engine:
            found[name] = [score(engine, texts) for texts in (greedy, held_out)]
            params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
            answers[name] = engine.generate([chat_ids], params)[0].text
    for title, *three in zip(
        ("greedy output of llama.cpp", "held-out text"), peers, *found.values(), strict=True
    ):
        print(f"{title}, {len(three[0].best)} tokens")
        print(*compare(*three), sep="\n")
    print(f"chat, greedy, {QUESTION!r}:")
    for name, answer in answers.items():
        print(f"  {name}: {answer!r}")


if __name__ == "__main__":
    main()
