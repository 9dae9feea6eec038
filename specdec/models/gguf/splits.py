"""Pre-tokenisation of byte-level vocabularies, by the name in `tokenizer.ggml.pre`.

The patterns are those of the published tokenizers that the models were trained with. llama.cpp simplifies
gpt-4o, tekken and kimi-k2: it recognises capitals only in ASCII, and does not treat marks as part of a word.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+ENDING|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*ENDING"
)
"""Splits before capitals within words."""
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
_TEKKEN = _CASED.replace("ENDING", "") + r"|\p{N}" + _SYMBOLS
_GPT4O = _CASED.replace("ENDING", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _SYMBOLS
_KIMI = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


class Splitting(NamedTuple):
    """How a text is split before merges."""

    patterns: Sequence[str]
    ignores_merges: bool = False
    """A word that is a token skips the merges."""
    composes: bool = False
    """Texts are normalised (NFC), as by the original tokenizer."""
    adds_bos: bool = False
    """Default if the file has no setting."""


SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        Splitting((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Splitting((_LLAMA3,), ignores_merges=True)),
    "qwen2": Splitting((_QWEN2,), composes=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "megrez", "kormo", "hunyuan", "bailingmoe", "bailingmoe2", "llada-moe"),
        Splitting((_QWEN2,)),
    ),
    "qwen35": Splitting((_QWEN35,), composes=True),
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone4", "a.x-4.0", "mellum", "trillion"),
        Splitting((_GPT2,)),
    ),
    **dict.fromkeys(
        ("refact", "starcoder", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Splitting((_DIGIT, _GPT2)),
    ),
    "seed-coder": Splitting((_SEED,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Splitting((_GPT4O,))),
    "tekken": Splitting((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "kimi-k2": Splitting((_KIMI,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Splitting(_DEEPSEEK3)),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
}
