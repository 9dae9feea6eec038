"""The bundled checkpoint: complete, small, readable by transformers, and worth drafting for."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SamplingParams, SpecEngine
from specdec.bench.acceptance.prompts import bundled
from specdec.models.checkpoint import Checkpoint
from specdec.models.folder import SHIPPED
from tests.tolerances import LOGITS_RELATIVE

TINY = SHIPPED["tiny"]
LARGEST = 24_000_000
PROMPTS, TOKENS = 8, 64


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= LARGEST
    names = {path.relative_to(TINY).as_posix() for path in TINY.rglob("*") if path.is_file()}
    assert names == {
        *("README.md", "loss.svg", "config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "token_counts.json"),
        *("eagle3/config.json", "eagle3/model.safetensors"),
    }


def test_a_folder_of_ones_own_may_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(TINY)
    assert Checkpoint("tiny").folder == TINY
    assert Checkpoint("./tiny/").folder.samefile(TINY)


@torch.inference_mode()
def test_transformers_opens_it_and_agrees() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    text = bundled(["code"])[0].text
    assert text is not None
    ids = tokenizer(text)["input_ids"]
    best = model(torch.tensor([ids])).logits[0]
    with SpecEngine("tiny", dtype="float32", draft="none", max_running=1, max_model_len=512) as engine:
        assert engine.tokenizer is not None and engine.tokenizer.encode(text) == ids
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
        (done,) = engine.generate([text], params)
        assert done.logprobs is not None
        (own,) = done.logprobs
    theirs = best[-1].log_softmax(-1).topk(5)
    assert [token for token, _ in own.top] == theirs.indices.tolist()
    found = torch.tensor([value for _, value in own.top])
    assert float((found - theirs.values).norm() / theirs.values.norm()) < LOGITS_RELATIVE
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a stack"}], tokenize=False)
    assert chat == "# user: a stack\n"


@pytest.mark.parametrize(("draft", "least"), [("mtp", 2.3), ("eagle", 1.4)])
def test_its_heads_draft_its_own_text(draft: str, least: float) -> None:
    """Untrained heads would stay at 1. In float32 the texts equal those without drafts."""
    prompts = [prompt.text or "" for prompt in bundled(["code"])[:PROMPTS]]
    room = {"dtype": "float32", "max_running": PROMPTS, "max_model_len": 512, "memory_bytes": 1 << 28}
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with SpecEngine("tiny", draft="none", **room) as engine:  # type: ignore[arg-type]
        plain = engine.generate(prompts, params)
    fixed = {"draft": draft, "num_steps": 4, "topk": 1, "adaptive": False}
    with SpecEngine("tiny", **room, **fixed) as engine:  # type: ignore[arg-type]
        drafted = engine.generate(prompts, params)
    assert [own.token_ids for own in drafted] == [own.token_ids for own in plain]
    steps = sum(own.stats.steps for own in drafted)
    assert sum(own.stats.output_tokens for own in drafted) / steps > least


def test_it_writes_python() -> None:
    """At a temperature too, it continues a class with indented code that uses `self`."""
    prompt = "class Stack:\n    def __init__(self, items):\n        self.items = items\n\n    def push(self"
    with SpecEngine("tiny", max_running=8, max_model_len=512, memory_bytes=1 << 28) as engine:
        params = SamplingParams(max_tokens=64, temperature=0.7, seed=3, n=8, ignore_eos=True)
        texts = [done.text for done in engine.generate([prompt], params)]
    assert sum("self." in text or "return" in text for text in texts) >= 5
    assert sum("\n        " in text for text in texts) >= 5
