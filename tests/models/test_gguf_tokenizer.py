"""Tokenizers from GGUF files; the expected tokens are llama.cpp's.

They are from `/tokenize` of the server in xllamacpp 2026.10.11549, with `parse_special`, for a Llama model
with one layer of zeros and the vocabulary of the test.
"""

import json
import random
import struct
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from specdec.errors import CheckpointError
from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.splits import SPLITTINGS
from specdec.models.gguf.tokenizer import Vocabulary
from specdec.text.chat_template import load_template
from specdec.text.tokenizer import BYTES, load_tokenizer
from tests.models.gguf_mutations import refusals
from tests.selection import EXHAUSTIVE

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def vocabulary(path: Path, model: str, tokens: Mapping[str, int], **fields: Any) -> Vocabulary:
    """Write a file with these tokens and their types, and load its vocabulary."""
    writer = gguf.GGUFWriter(path / "small.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    add_fields(writer, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Vocabulary(GgufFile(path / "small.gguf"))


def add_fields(writer: Any, fields: Mapping[str, Any]) -> None:
    kinds: Mapping[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        list: writer.add_array,
        bytes: writer.add_array,
    }
    for name, value in fields.items():
        prefix = "tokenizer." if name.startswith("chat_template") else "tokenizer.ggml."
        kinds[type(value)](prefix + name, value)


TEXT = (
    "It's WE'LL don't camelCase HTTPServer 1234567 qz\n\nx²½ é漢字カナ한글  (x)!=y;//\n/\r\n\r\n\t  z_q "
    "\u00a0.👍🏽 'Re<think> tail   "
)


def chains() -> tuple[dict[str, int], list[str]]:
    """Return a vocabulary of the text's substrings, and merges of all but those with "qz"."""
    signs = {byte: sign for sign, byte in BYTES.items()}
    data = "".join(signs[byte] for byte in TEXT.encode())
    words = dict.fromkeys(data[i : i + n] for i in range(len(data) - 1) for n in range(2, 24))
    tokens = dict.fromkeys([*BYTES, *words], NORMAL) | {"<s>": CONTROL, "<think>": USER_DEFINED}
    return tokens, [f"{word[:-1]} {word[-1]}" for word in words if "qz" not in word]


EXPECTED = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        (
            "<s>¦It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦123¦456¦7¦ qz¦\n\n¦x¦²½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    **dict.fromkeys(
        ("dbrx", "smaug-bpe", "chatglm-bpe"),
        (
            "It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦123¦456¦7¦ q¦z¦\n\n¦x¦²½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    **dict.fromkeys(
        ("glm4", "glm5"),
        (
            "It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦123¦456¦7¦ qz¦\n\n¦x¦²½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    **dict.fromkeys(
        (
            "qwen2",
            "deepseek-r1-qwen",
            "megrez",
            "kormo",
            "hunyuan",
            "qwen35",
            "bailingmoe",
            "bailingmoe2",
            "llada-moe",
        ),
        (
            "It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦1¦2¦3¦4¦5¦6¦7¦ q¦z¦\n\n¦x¦²¦½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone4", "a.x-4.0", "mellum", "trillion"),
        (
            "It¦'s¦ WE¦'¦LL¦ don¦'t¦ camelCase¦ HTTPServer¦ 1234567¦ q¦z¦\n¦\n¦x¦²½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//¦\n¦/¦\r\n¦\r\n\t ¦ z¦_¦q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    **dict.fromkeys(
        ("refact", "starcoder", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (
            "It¦'s¦ WE¦'¦LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦1¦2¦3¦4¦5¦6¦7¦ q¦z¦\n¦\n¦x¦²¦½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//¦\n¦/¦\r\n¦\r\n\t ¦ z¦_¦q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    "seed-coder": (
        "It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦1¦2¦3¦4¦5¦6¦7¦ q¦z¦\n\n¦x¦²¦½¦"
        " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//¦\n¦/¦\r\n¦\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
    ),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
        (
            "It's¦ WE'LL¦ don't¦ camel¦Case¦ HTTPServer¦ ¦123¦456¦7¦ q¦z¦\n\n¦x¦²½¦"
            " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    "tekken": (
        "<s>¦It¦'s¦ WE¦'LL¦ don¦'t¦ camel¦Case¦ HTTPServer¦ ¦1¦2¦3¦4¦5¦6¦7¦ qz¦\n\n¦x¦²¦½¦"
        " é漢字カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
    ),
    "kimi-k2": (
        "It's¦ WE'LL¦ don't¦ camel¦Case¦ HTTPServer¦ ¦123¦456¦7¦ q¦z¦\n\n¦x¦²½¦"
        " é¦漢字¦カナ한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        (
            "It¦'s¦ WE¦'LL¦ don¦'t¦ camelCase¦ HTTPServer¦ ¦123¦456¦7¦ q¦z¦\n\n¦x¦²½¦"
            " é¦漢字カナ¦한글¦ ¦ (¦x¦)!=¦y¦;//\n¦/\r\n\r\n¦\t ¦ z¦_q¦ ¦\u00a0¦.👍🏽¦ '¦Re¦<think>¦ tail¦   "
        ),
    ),
    "deepseek-coder": (
        "It¦'¦s¦ WE¦'¦LL¦ don¦'¦t¦ camelCase¦ HTTPServer¦ ¦1¦2¦3¦4¦5¦6¦7¦ q¦z¦\n¦\n¦x¦²¦½¦"
        " é¦漢字カナ한글¦ ¦ (¦x¦)!¦=¦y¦;//¦\n¦/¦\r¦\n¦\r¦\n¦\t ¦ z¦_¦q¦ ¦\u00a0.¦👍¦🏽"
        "¦ '¦Re¦<think>¦ tail¦   "
    ),
}
"""Splits of the text, by `tokenizer.ggml.pre`. For kimi-k2 llama.cpp does not split camelCase."""


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_texts_are_split_as_llama_cpp_splits_them(pre: str, tmp_path: Path) -> None:
    tokens, merges = chains()
    begin = list(tokens).index("<s>")
    fields = {"pre": pre, "merges": merges, "bos_token_id": begin, "eos_token_id": begin}
    found = vocabulary(tmp_path, "gpt2", tokens, **fields).tokenizer().encode(TEXT).tokens
    assert "¦".join(map(spelled, found)) == EXPECTED[pre]


def spelled(token: str) -> str:
    return token if token.startswith("<") else bytes(BYTES[sign] for sign in token).decode()


CASED = "ДаНЕТ ÀÉàé ΣΑσας ǅǈ a\u0301b\u0323 \u0301x हिन्दी ไทย İi\u0307 \u3000.\u2028 \u200d🏽'ſ"


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITTINGS.keys()))
def test_other_scripts_are_split_by_the_published_patterns(pre: str) -> None:
    """llama.cpp has simpler ones for some names."""
    words = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITTINGS[pre].patterns]
    )
    assert own.pre_tokenize_str(CASED) == words.pre_tokenize_str(CASED)


PIECES = (
    *("▁t", "he", "▁the", "in", "▁a", "▁▁", "▁▁▁▁", "lo", "llo", "hello", "▁hello", "▁hel", "er", "aa"),
    *("aaaa", "th", "ing", "nd", "▁and", "é", "ab", "abc", "bc", "▁<", "▁x", "漢", "\u0301", "▁", "e"),
    *(
        "t",
        "a",
        "o",
        "n",
        "i",
        "h",
        "l",
        "r",
        "d",
        "g",
        "b",
        "c",
        "x",
        "<",
        ">",
        "/",
        "s",
        "1",
        "2",
        "字",
        "\n",
    ),
)
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
BYTES_OF = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
SENTENCES = (
    *("", " ", "the hello and thing", " hello", "  hello  ", "a b\tc\r\n d\n\n", "aaaaaaa aaa aa"),
    *("abcbc abab", "caf\u00e9 cafe\u0301", "漢字カ🏽\u200d", "1212 x22", "▁a ▁ ▁▁", "\u00a0x\u3000"),
    *("<s>the</s> the", "a<tool> <tool>in", "<0x41> <unk>", "<s <s>> </s", "\x00\x7f", "שם ١", "ﬁ Å"),
    *(" " * 5, " " * 9 + "x", "x" + " " * 6),
)
TOKENS = {
    "SentencePiece": (
        "<s>",
        "<s>¦▁▁",
        "<s>¦▁the¦▁hello¦▁and¦▁t¦h¦ing",
        "<s>¦▁▁¦hello",
        "<s>¦▁▁¦▁hello¦▁▁",
        "<s>¦▁a¦▁¦b¦<09>¦c¦<0D>¦\n¦▁¦d¦\n¦\n",
        "<s>¦▁a¦aaaa¦aa¦▁a¦aa¦▁a¦a",
        "<s>¦▁a¦bc¦bc¦▁a¦b¦ab",
        "<s>¦▁¦c¦a¦<66>¦é¦▁¦c¦a¦<66>¦e¦\u0301",
        "<s>¦▁¦漢¦字¦<E3>¦<82>¦<AB>¦<F0>¦<9F>¦<8F>¦<BD>¦<E2>¦<80>¦<8D>",
        "<s>¦▁¦1¦2¦1¦2¦▁x¦2¦2",
        "<s>¦▁¦▁a¦▁▁▁▁¦▁",
        "<s>¦▁¦<C2>¦<A0>¦x¦<E3>¦<80>¦<80>",
        "<s>¦<s>¦▁the¦</s>¦▁¦▁the",
        "<s>¦▁a¦<tool>¦▁▁¦<tool>¦▁¦in",
        "<s>¦▁<¦<30>¦x¦<34>¦1¦>¦▁¦<unk>",
        "<s>¦▁<¦s¦▁¦<s>¦▁¦>¦▁<¦/¦s",
        "<s>¦▁¦<00>¦<7F>",
        "<s>¦▁¦<D7>¦<A9>¦<D7>¦<9D>¦▁¦<D9>¦<A1>",
        "<s>¦▁¦<EF>¦<AC>¦<81>¦▁¦<C3>¦<85>",
        "<s>¦▁▁▁▁¦▁▁",
        "<s>¦▁▁▁▁¦▁▁▁▁¦▁▁¦x",
        "<s>¦▁x¦▁▁▁▁¦▁▁",
    ),
    "SentencePiece without a space": (
        "</s>",
        "▁¦</s>",
        "t¦he¦▁hello¦▁and¦▁t¦h¦ing¦</s>",
        "▁hello¦</s>",
        "▁▁¦hello¦▁▁¦</s>",
        "a¦▁¦b¦<09>¦c¦<0D>¦\n¦▁¦d¦\n¦\n¦</s>",
        "aaaa¦aa¦a¦▁a¦aa¦▁a¦a¦</s>",
        "abc¦bc¦▁a¦b¦ab¦</s>",
        "c¦a¦<66>¦é¦▁¦c¦a¦<66>¦e¦\u0301¦</s>",
        "漢¦字¦<E3>¦<82>¦<AB>¦<F0>¦<9F>¦<8F>¦<BD>¦<E2>¦<80>¦<8D>¦</s>",
        "1¦2¦1¦2¦▁x¦2¦2¦</s>",
        "▁a¦▁▁▁▁¦▁¦</s>",
        "<C2>¦<A0>¦x¦<E3>¦<80>¦<80>¦</s>",
        "<s>¦t¦he¦</s>¦▁the¦</s>",
        "a¦<tool>¦▁¦<tool>¦in¦</s>",
        "<¦<30>¦x¦<34>¦1¦>¦▁¦<unk>¦</s>",
        "<¦s¦▁¦<s>¦>¦▁<¦/¦s¦</s>",
        "<00>¦<7F>¦</s>",
        "<D7>¦<A9>¦<D7>¦<9D>¦▁¦<D9>¦<A1>¦</s>",
        "<EF>¦<AC>¦<81>¦▁¦<C3>¦<85>¦</s>",
        "▁▁▁▁¦▁¦</s>",
        "▁▁▁▁¦▁▁▁▁¦▁x¦</s>",
        "x¦▁▁▁▁¦▁▁¦</s>",
    ),
    "Unigram": (
        "</s>",
        "▁¦</s>",
        "▁the¦▁hello¦▁and¦▁t¦h¦ing¦</s>",
        "▁▁¦hello¦</s>",
        "▁▁¦▁hello¦▁▁¦</s>",
        "▁a¦▁¦b¦<unk>¦c¦<unk>¦\n¦▁¦d¦\n¦\n¦</s>",
        "▁a¦aa¦aaaa¦▁a¦aa¦▁a¦a¦</s>",
        "▁a¦bc¦bc¦▁a¦b¦ab¦</s>",
        "▁¦c¦a¦<unk>¦é¦▁¦c¦a¦<unk>¦e¦\u0301¦</s>",
        "▁¦漢¦字¦<unk>¦</s>",
        "▁¦1¦2¦1¦2¦▁x¦2¦2¦</s>",
        "▁¦▁a¦▁¦▁▁▁▁¦</s>",
        "▁¦<unk>¦x¦<unk>¦</s>",
        "<s>¦▁the¦</s>¦▁¦▁the¦</s>",
        "▁a¦<tool>¦▁¦<tool>¦▁¦in¦</s>",
        "▁<¦<unk>¦x¦<unk>¦1¦>¦▁¦<unk>¦</s>",
        "▁<¦s¦▁¦<s>¦▁¦>¦▁<¦/¦s¦</s>",
        "▁¦<unk>¦</s>",
        "▁¦<unk>¦▁¦<unk>¦</s>",
        "▁¦<unk>¦▁¦<unk>¦</s>",
        "▁¦▁▁▁▁¦</s>",
        "▁▁¦▁▁▁▁¦▁▁▁▁¦x¦</s>",
        "▁x¦▁▁¦▁▁▁▁¦</s>",
    ),
    "Unigram with single spaces": (
        "<s>¦</s>",
        "<s>¦</s>",
        "<s>¦▁the¦▁hello¦▁and¦▁t¦h¦ing¦</s>",
        "<s>¦▁hello¦</s>",
        "<s>¦▁hello¦</s>",
        "<s>¦▁a¦▁¦b¦<unk>¦c¦<unk>¦\n¦▁¦d¦\n¦\n¦</s>",
        "<s>¦▁a¦aa¦aaaa¦▁a¦aa¦▁a¦a¦</s>",
        "<s>¦▁a¦bc¦bc¦▁a¦b¦ab¦</s>",
        "<s>¦▁¦c¦a¦<unk>¦é¦▁¦c¦a¦<unk>¦e¦\u0301¦</s>",
        "<s>¦▁¦漢¦字¦<unk>¦</s>",
        "<s>¦▁¦1¦2¦1¦2¦▁x¦2¦2¦</s>",
        "<s>¦▁¦▁a¦▁¦▁▁▁▁¦</s>",
        "<s>¦▁¦<unk>¦x¦<unk>¦</s>",
        "<s>¦<s>¦▁the¦</s>¦▁the¦</s>",
        "<s>¦▁a¦<tool>¦<tool>¦▁¦in¦</s>",
        "<s>¦▁<¦<unk>¦x¦<unk>¦1¦>¦<unk>¦</s>",
        "<s>¦▁<¦s¦<s>¦▁¦>¦▁<¦/¦s¦</s>",
        "<s>¦▁¦<unk>¦</s>",
        "<s>¦▁¦<unk>¦▁¦<unk>¦</s>",
        "<s>¦▁¦<unk>¦▁¦<unk>¦</s>",
        "<s>¦</s>",
        "<s>¦▁x¦</s>",
        "<s>¦▁x¦</s>",
    ),
}
"""Tokens of each sentence, without the first characters of byte tokens."""
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "SentencePiece": ("llama", {}),
    "SentencePiece without a space": (
        "llama",
        {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True},
    ),
    "Unigram": ("t5", {"eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": True}),
    "Unigram with single spaces": (
        "t5",
        {
            **{"eos_token_id": 2, "unknown_token_id": 0, "bos_token_id": 1},
            **{"remove_extra_whitespaces": True, "add_bos_token": True},
        },
    ),
}


def scored(path: Path, model: str, **fields: Any) -> Vocabulary:
    """Write a vocabulary in which earlier pieces have better scores."""
    tokens = {**SPECIAL, **(BYTES_OF if model == "llama" else {}), **dict.fromkeys(PIECES, NORMAL)}
    scores = [0.0] * (len(tokens) - len(PIECES)) + [-1.0 - i / 4 for i in range(len(PIECES))] + [0.0]
    return vocabulary(path, model, tokens | {"<tool>": USER_DEFINED}, scores=scores, **fields)


@pytest.mark.parametrize("form", FORMS)
def test_sentences_have_the_tokens_that_llama_cpp_gives_them(form: str, tmp_path: Path) -> None:
    model, fields = FORMS[form]
    made = scored(tmp_path, model, **fields).tokenizer()
    found = [[str(made.id_to_token(i)) for i in made.encode(sentence).ids] for sentence in SENTENCES]
    assert ["¦".join(tokens).replace("<0x", "<") for tokens in found] == list(TOKENS[form])
    assert made.decode(made.encode("the hello").ids) == "the hello"


@pytest.mark.parametrize(
    ("model", "fields", "field", "why"),
    [
        ("llama", {"scores": [1.0]}, "tokenizer.ggml.scores", "a number for each of 2 tokens"),
        ("llama", {}, "tokenizer.ggml.scores", "a number for each of 2 tokens"),
        ("t5", {"scores": [0.0, float("nan")]}, "tokenizer.ggml.scores", "a number for each of 2 tokens"),
        ("gpt2", {"pre": "gpt-2"}, "tokenizer.ggml.merges", "a list of strings"),
        ("gpt2", {"pre": "glm-9"}, "tokenizer.ggml.pre", r"qwen35.*not 'glm-9'; take another file"),
        ("bert", {}, "tokenizer.ggml.model", r"byte-level BPE.*SentencePiece.*Unigram.*not 'bert'"),
        (
            "t5",
            {"scores": [0.0, 0.0], "unknown_token_id": 9},
            "tokenizer.ggml.unknown_token_id",
            "an id below 2",
        ),
    ],
)
def test_an_invalid_tokenizer_is_named(
    model: str, fields: Mapping[str, Any], field: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why) as refused:
        vocabulary(tmp_path, model, {"a": NORMAL, "b": NORMAL}, **fields).tokenizer()
    assert refused.value.field == field


ALPHABETS = ("a", "ab", "abc")


@pytest.mark.parametrize("seed", range(3))
def test_distinct_scores_give_the_tokens_of_sentencepiece(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        letters = ALPHABETS[seed]
        words = {"".join(rng.choices(letters, k=rng.randint(2, 6))): NORMAL for _ in range(12)}
        tokens = {"<unk>": UNKNOWN, **dict.fromkeys(letters, NORMAL), **words}
        scores = [-float(own) for own in rng.sample(range(100), len(tokens))]
        made = unspaced(tmp_path, tokens, scores)
        for text in ("".join(rng.choices(letters, k=24)) for _ in range(20)):
            assert made.encode(text).tokens == merged(text, dict(zip(tokens, scores, strict=True)))


def test_equal_scores_give_the_tokens_of_the_original_tokenizer(tmp_path: Path) -> None:
    """The converter writes -1000 for every token of a tokenizer.json, whose ids are in order of its merges.

    llama.cpp would merge the leftmost pair, whatever the original tokenizer does.
    """
    theirs = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    texts = [*Path(__file__).read_text().splitlines()[:200], TEXT]
    theirs.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"]))
    ids = theirs.get_vocab()
    tokens = {token: UNKNOWN if token == "<unk>" else NORMAL for token in sorted(ids, key=ids.__getitem__)}
    scores = [-1000.0] * len(tokens)
    ours = unspaced(tmp_path, tokens, scores)
    unlike = 0
    for text in (text.replace(" ", "")[:80] for text in texts):
        assert ours.encode(text).tokens == theirs.encode(text).tokens
        unlike += ours.encode(text).tokens != merged(text, dict(zip(tokens, scores, strict=True)))
    assert unlike > 20
    tied = {"<unk>": UNKNOWN, "a": NORMAL, "b": NORMAL, "ab": NORMAL, "ba": NORMAL}
    made = unspaced(tmp_path, tied, [0.0, -2.0, -2.0, -1.0, -1.0])
    assert made.encode("bbbaba").tokens == ["b", "b", "b", "ab", "a"]


def unspaced(path: Path, tokens: Mapping[str, int], scores: list[float]) -> Tokenizer:
    given = {"add_bos_token": False, "add_space_prefix": False}
    return vocabulary(path, "llama", tokens, scores=scores, **given).tokenizer()


def merged(text: str, scores: Mapping[str, float]) -> list[str]:
    """Merge like llama.cpp: the pair with the best score, the leftmost of several."""
    found = list(text)
    while True:
        pairs = (own + other for own, other in pairwise(found))
        best = min(((-scores[pair], i) for i, pair in enumerate(pairs) if pair in scores), default=None)
        if best is None:
            return found
        found[best[1] : best[1] + 2] = [found[best[1]] + found[best[1] + 1]]


def charsmap(rules: Mapping[str, str]) -> bytes:
    """Write rules for ASCII characters as a double-array trie: a block of children, one for each leaf."""
    units, texts = np.zeros(256 * (2 + len(rules)), "<u4"), b""
    units[0] = 256 << 10
    for i, (character, text) in enumerate(rules.items()):
        at, leaf = 256 ^ ord(character), 256 * (2 + i)
        units[at] = ord(character) | 1 << 8 | (at ^ leaf) << 10
        units[leaf] = 1 << 31 | len(texts)
        texts += text.encode() + b"\0"
    return struct.pack("<I", units.nbytes) + units.tobytes() + texts


def unigram(path: Path, table: object) -> Tokenizer:
    given = {"scores": [-9.0, -1.0, -1.0], "unknown_token_id": 0, "precompiled_charsmap": table}
    tokens = {"<unk>": UNKNOWN, "b": NORMAL, "é": NORMAL}
    return vocabulary(path, "t5", tokens, **given, add_eos_token=False).tokenizer()


def test_a_charsmap_replaces_characters(tmp_path: Path) -> None:
    made = unigram(tmp_path, charsmap({"a": "b", "x": "éb"}))
    assert made.encode("axb").tokens == ["b", "é", "b", "b"]


RULES = charsmap({"a": "é", "x": "b"})
LEAF = struct.pack("<I", 1 << 31)
"""The first leaf's unit: the text at 0."""


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(b"\0\0\0\0x\0", id="no root"),
        pytest.param(b"\xff\xff\xff\xff", id="a size above the data"),
        pytest.param(b"\2\0\0\0\1\1", id="half a unit"),
        pytest.param([1, 2, 3, 4000], id="integers"),
        pytest.param(["a", "b"], id="strings"),
        pytest.param("a", id="a string"),
        pytest.param(struct.pack("<II", 4, 0) + b"a\0", id="children outside the trie"),
        pytest.param(RULES.replace(LEAF, struct.pack("<I", 1 << 31 | 5)), id="a text past the end"),
        pytest.param(RULES.replace(LEAF, struct.pack("<I", 1 << 31 | 1)), id="half a character"),
    ],
)
def test_an_invalid_charsmap_is_refused(table: object, tmp_path: Path) -> None:
    """Most would make the library panic at a text."""
    with pytest.raises(CheckpointError) as refused:
        unigram(tmp_path, table)
    assert refused.value.field == "tokenizer.ggml.precompiled_charsmap"


@pytest.mark.parametrize("count", [200, pytest.param(3_000, marks=EXHAUSTIVE)])
def test_no_charsmap_makes_the_library_panic(count: int, tmp_path: Path) -> None:
    rng, refused, texts = random.Random(0), 0, [*map(chr, range(1, 128)), "axé", "\u0301a"]
    places = [i for i, byte in enumerate(RULES) if byte or i % 1024 < 8]
    for _ in range(count):
        own = bytearray(RULES)
        for _ in range(rng.choice([1, 2, 8])):
            own[rng.choice(places)] = rng.randrange(256)
        try:
            made = unigram(tmp_path, bytes(own))
        except CheckpointError:
            refused += 1
            continue
        for text in texts:
            made.encode(text)
    assert count / 10 < refused < count


def test_a_template_that_writes_bos_gets_no_second_one(tmp_path: Path) -> None:
    made = scored(
        tmp_path,
        "llama",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        **{"chat_template.tool_use": "{{ bos_token }}tools", "chat_templates": ["tool_use"]},
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(made.config()))
    made.tokenizer().save(str(tmp_path / "tokenizer.json"))
    template, tokenizer = load_template(tmp_path), load_tokenizer(tmp_path)
    assert tokenizer
    chat = template.render([{"role": "user", "content": "hello"}])
    assert tokenizer.encode(chat, special=False) == tokenizer.encode("hello")
    assert tokenizer.encode("hello")[0] == 1
    assert template.render([{"role": "user", "content": ""}], {"tools": [{}]}) == "<s>tools"


@pytest.mark.parametrize(
    ("tokens", "fields", "endings"),
    [
        ({"a": NORMAL, "<|im_end|>": CONTROL, "<|end|>": CONTROL}, {"eos_token_id": 0}, [0, 1, 2]),
        ({"</s>": NORMAL, "<|eot_id|>": USER_DEFINED}, {"eom_token_id": 1}, [1]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {"eos_token_id": 1}, [1, 2]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "a": NORMAL}, {"eot_token_id": 2}, [2, 0, 1]),
    ],
)
def test_answers_end_with_the_tokens_that_files_name_and_known_ones(
    tokens: Mapping[str, int], fields: Mapping[str, Any], endings: list[int], tmp_path: Path
) -> None:
    """With calls, `<|end|>` ends only a message. Ordinary tokens may be spelled like special ones."""
    assert vocabulary(tmp_path, "gpt2", tokens, pre="gpt-2", **fields).endings() == endings


def test_a_token_of_a_megabyte_takes_no_time(tmp_path: Path) -> None:
    """Testing two million split positions would be slow."""
    tokens = {"<unk>": UNKNOWN, "a": NORMAL, "a" * (1 << 21): NORMAL}
    made = vocabulary(tmp_path, "llama", tokens, scores=[0.0, -1.0, -2.0], add_bos_token=False)
    assert made.tokenizer().encode("<unk>").ids == [0]


@pytest.mark.parametrize("count", [60, pytest.param(3_000, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_a_changed_field_is_refused_or_loads(model: str, count: int, tmp_path: Path) -> None:
    def load(path: Path) -> None:
        found = Vocabulary(GgufFile(path))
        found.endings(), found.config()
        made = found.tokenizer()
        made.decode(made.encode(TEXT).ids)

    if model == "gpt2":
        tokens, merges = chains()
        vocabulary(tmp_path, model, tokens, pre="llama-bpe", merges=merges, bos_token_id=1)
    else:
        scored(tmp_path, model, **FORMS["Unigram" if model == "t5" else "SentencePiece"][1])
    assert refusals(tmp_path / "small.gguf", load, count, seed=model)
