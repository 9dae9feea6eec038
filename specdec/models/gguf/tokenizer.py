"""The tokenizer that a GGUF file describes, as tokenizer.json and tokenizer_config.json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specdec.errors import CheckpointError
from specdec.models.fields import Fields
from specdec.models.gguf.file import OTHERWISE, GgufFile

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Llama 3's."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's, in which marks belong to the letter before."""


class Splitting(NamedTuple):
    """How a text is split before its tokens are merged."""

    patterns: Sequence[str]
    ignores_merges: bool = False
    """A word that is a token is not put together."""
    composes: bool = False
    """Texts are normalised (NFC), as by the tokenizer that the file was made from."""
    adds_bos: bool = False
    """Where the file says nothing."""


SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        Splitting((_WORDS,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((_WORDS,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo"),
        Splitting((_WORDS.replace(r"\p{N}{1,3}", _DIGIT),), composes=True),
    ),
    "qwen35": Splitting((_MARKED,), composes=True),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "exaone4"), Splitting((_GPT2,))),
    **dict.fromkeys(("refact", "starcoder", "command-r", "smollm", "codeshell"), Splitting((_DIGIT, _GPT2))),
}
"""By what `tokenizer.ggml.pre` says."""
ENDINGS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "</s>", "<EOT>", "[EOT]", "[EOS]", "<|flush|>"),
)
"""Control tokens that end an answer, whatever they are called in a file."""
NONE = (None, "no_vocab")
"""Files without a tokenizer, which take token ids only."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class Vocabulary:
    """The tokens of a file, and what is special about some."""

    def __init__(self, file: GgufFile) -> None:
        self.fields = fields = Fields(file.metadata, file=file.path.name)
        self.file = file
        self.tokens = file.strings("tokenizer.ggml.tokens")
        if not self.tokens:
            fields.refuse("tokenizer.ggml.tokens", "a list of strings")
        self.kinds = [_NORMAL] * len(self.tokens)
        if (kinds := fields.get("tokenizer.ggml.token_type")) is not None:
            is_list = isinstance(kinds, np.ndarray) and kinds.dtype.kind in "iu"
            if not is_list or len(kinds) != len(self.tokens):
                fields.refuse(
                    "tokenizer.ggml.token_type", f"an integer for each of {len(self.tokens)} tokens"
                )
            self.kinds = kinds.tolist()

    def id(self, name: str) -> int | None:
        """Return the id of a special token."""
        field = f"tokenizer.ggml.{name}_token_id"
        if field not in self.fields:
            return None
        found = self.fields.integer(field, least=0)
        if found >= len(self.tokens):
            self.fields.refuse(field, f"an id below {len(self.tokens)}")
        return found

    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with the BOS token."""
        default = self._splitting().adds_bos
        return self.id("bos") is not None and self.fields.flag(
            "tokenizer.ggml.add_bos_token", default=default
        )

    def endings(self) -> list[int]:
        """Return the tokens that end an answer."""
        found = [self.id(name) for name in ("eos", "eot", "eom")]
        named = [i for i, kind in enumerate(self.kinds) if kind == _CONTROL and self.tokens[i] in ENDINGS]
        return list(dict.fromkeys([*(own for own in found if own is not None), *named]))

    def tokenizer(self) -> Tokenizer:
        """Build byte-level BPE, split as llama.cpp does for this name."""
        own = self._splitting()
        known = {token: i for i, token in enumerate(self.tokens)}
        if len(known) < len(self.tokens):
            self.fields.refuse("tokenizer.ggml.tokens", "tokens that differ from each other")
        made = Tokenizer(models.BPE(known, list(self._merges(known)), ignore_merges=own.ignores_merges))
        if own.composes:
            made.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in own.patterns]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        made.add_tokens(list(self._added()))
        if self.adds_bos:
            begin = self.tokens[self.id("bos") or 0]
            made.post_processor = processors.TemplateProcessing(
                single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, known[begin])]
            )
        return made

    def config(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        given = {name: self.id(key) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
        template = self.fields.get("tokenizer.chat_template")
        return {
            **{f"{name}_token": self.tokens[own] for name, own in given.items() if own is not None},
            **({"chat_template": template} if isinstance(template, str) else {}),
        }

    def _splitting(self) -> Splitting:
        model = self.fields.get("tokenizer.ggml.model")
        if model != "gpt2":
            self._refuse("tokenizer.ggml.model", f"byte-level BPE ('gpt2'), and not {str(model)[:80]!r}")
        name = str(self.fields.get("tokenizer.ggml.pre"))
        if name not in SPLITTINGS:
            self._refuse("tokenizer.ggml.pre", f"{', '.join(SPLITTINGS)}, and not {name[:80]!r}")
        return SPLITTINGS[name]

    def _refuse(self, field: str, needs: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file.path.name}: of tokenizers specdec reads {needs}; {OTHERWISE}", field=field
        )

    def _merges(self, known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield merges; those of tokens that are not there, llama.cpp never makes."""
        for line in self.file.strings("tokenizer.ggml.merges"):
            cut = line.find(" ", 1)
            first, second = line[:cut], line[cut + 1 :]
            if cut > 0 and first in known and second in known and first + second in known:
                yield first, second

    def _added(self) -> Iterator[AddedToken]:
        for token, kind in zip(self.tokens, self.kinds, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                yield AddedToken(token, special=kind == _CONTROL, normalized=False)
