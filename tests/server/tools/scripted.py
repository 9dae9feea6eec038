"""A checkpoint that generates given texts: real weights whose next token depends only on the last one.

Its layers add nothing; the output matrix maps each token's embedding to its successor's row. A text is cut
into tokens that occur only once, so that its first token leads through all of it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.conftest import HYBRID

END = "<|endoftext|>"
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
HIDDEN = 256
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def write_scripted(folder: Path, scripts: Mapping[str, str], template: str, *, tags: str = "") -> None:
    """Write a model that generates a script if the last character of its prompt is the script's key.

    In the script of the key `tags`, the tags around calls and thinking are single tokens, which the tokenizer
    marks as special.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    added = {text: len(vocab) + i for i, text in enumerate((END, *TAGS))}
    after: dict[int, int] = {}
    pieces: list[str] = []
    first = len(vocab) + len(added)
    for key, script in scripts.items():
        last = vocab[key]
        for piece in _cut(script, {*pieces, *vocab}, tags=key == tags):
            token = added.get(piece, first + len(pieces))
            if piece not in added:
                pieces.append(piece)
            after[last] = last = token
        after[last] = added[END]
    spelt = ["".join(own for own, _ in byte_level.pre_tokenize_str(piece)) for piece in pieces]
    told = {text: first + i for i, text in enumerate(spelt)}
    bpe = models.BPE(vocab={**vocab, **added, **told}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    _write_weights(folder, after, first + len(pieces), added[END])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}), "utf-8")


def _cut(text: str, used: set[str], *, tags: bool) -> list[str]:
    """Cut a text into unused pieces; tags that are tokens stay whole."""
    parts = re.split(f"({'|'.join(TAGS)})", text) if tags else [text]
    rng = Random(text)
    for _ in range(1000):
        pieces = [piece for part in parts for piece in ([part] if part in TAGS else _shred(part, rng))]
        if len({*pieces}) == len(pieces) and not used & {*pieces}:
            return pieces
    raise AssertionError("parts of this text come too often")


def _shred(text: str, rng: Random) -> list[str]:
    pieces = []
    while text:
        length = rng.randint(2, 9)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def _write_weights(folder: Path, after: Mapping[int, int], vocab: int, end: int) -> None:
    settings: dict[str, Any] = {**HYBRID, "vocab_size": vocab, "hidden_size": HIDDEN}
    settings |= {"tie_word_embeddings": False, "eos_token_id": end, "max_position_embeddings": 2048}
    settings |= {"bos_token_id": None, "pad_token_id": None}
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        own = dict(model.named_parameters())
        for name, value in own.items():
            if name.endswith(OUTPUTS):
                value.zero_()
        embed_VD = own["model.embed_tokens.weight"].bernoulli_().mul_(2).sub_(1)
        head_VD = own["lm_head.weight"].zero_()
        for token, successor in after.items():
            head_VD[successor] += embed_VD[token]
    model.save_pretrained(folder)
