"""A byte-level tokenizer trained on the corpus, and the corpus as one token stream."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_tiny.corpus import Document

END = "<|endoftext|>"
"""Precedes every document and ends an answer; its id is 0."""
CHAT = (
    "{%- for message in messages %}"
    "{{- '# ' + message.role + ': ' + (message.content | trim | replace('\\n', '\\n# ')) + '\\n' }}"
    "{%- endfor %}"
)
"""Turns become comments, followed by code: the model has seen no dialogue."""
BATCH = 256

# Words with the preceding symbol, single digits, runs of symbols, line ends with the following indentation.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Stream = NDArray[np.uint16]


def learn(documents: Sequence[Document], vocab: int) -> Tokenizer:
    """Train merges on the training documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Stream:
    """Return all documents as one stream, each preceded by END."""
    return np.fromiter(_ids(tokenizer, documents), dtype=np.uint16)


def _ids(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[int]:
    for at in range(0, len(documents), BATCH):
        for encoded in tokenizer.encode_batch([d.text for d in documents[at : at + BATCH]]):
            yield 0
            yield from encoded.ids


def windows(stream: Stream, *, step: int, batch: int, length: int, seed: int) -> Stream:
    """Return a step's windows [batch, length]: disjoint ones, reshuffled in each epoch.

    Depends only on its arguments, so that a resumed run gets the same windows.
    """
    a_pass = (len(stream) - length) // length
    rows = np.arange(step * batch, (step + 1) * batch)
    cut = []
    for epoch, place in zip(rows // a_pass, rows % a_pass, strict=True):
        draw = np.random.default_rng((seed, int(epoch)))
        start = int(draw.integers(length)) + length * int(draw.permutation(a_pass)[place])
        cut.append(stream[start : start + length])
    return np.stack(cut)


def save(tokenizer: Tokenizer, counts: Sequence[int], folder: Path, max_length: int) -> None:
    """Write the files for `transformers`, and the tokens' counts in the training text."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "token_counts.json").write_text(json.dumps({"counts": list(counts)}) + "\n")
