"""A GGUF file's tokenizer, as tokenizer.json and tokenizer_config.json."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specdec.errors import CheckpointError
from specdec.models.fields import Fields
from specdec.models.gguf.file import OTHERWISE, GgufFile, GgufStrings
from specdec.models.gguf.splits import SPLITTINGS

ENDINGS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|return|>"),
    *("<|call|>", "<|calls|>", "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>", "<EOT>", "[EOT]"),
    *("[EOS]", "[e~[", "<|flush|>", "<｜end▁of▁sentence｜>"),
)
"""Special tokens that end a response, whatever their role in a file."""
_CALLS, _TURNS, _MESSAGE = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}, "<|end|>"
"""If a vocabulary has tokens of the first two sets, the third only ends a message within a response
(gpt-oss)."""
LONGEST = 256
"""Maximum characters of a token derived by merging: every split position is tried."""
NONE = (None, "no_vocab")
"""Files without a tokenizer, which only support token ids."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.(.+))?")
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's space."""


class TokenizerDefaults(NamedTuple):
    """Defaults of missing settings, as in llama.cpp."""

    ids: Mapping[str, int]
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool = False
    """Before a text and after special tokens."""


_ASSUMED = {
    "llama": TokenizerDefaults({"bos": 1, "eos": 2, "unknown": 0}, adds_bos=True, adds_space=True),
    "t5": TokenizerDefaults({"eos": 1, "unknown": 2, "padding": 0}, adds_eos=True),
}


class Vocabulary:
    """A file's tokens and their special roles."""

    def __init__(self, file: GgufFile) -> None:
        self.fields = fields = Fields(file.metadata, file=file.path.name)
        self.file = file
        self.tokens = file.strings("tokenizer.ggml.tokens")
        if not self.tokens:
            fields.refuse("tokenizer.ggml.tokens", "a list of strings")
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) < len(self.tokens):
            fields.refuse("tokenizer.ggml.tokens", "tokens that differ from each other")
        self.kinds = [_NORMAL] * len(self.tokens)
        if "tokenizer.ggml.token_type" in fields:
            self.kinds = self._numbers("tokenizer.ggml.token_type", "iu", "an integer")
        model = str(fields.get("tokenizer.ggml.model"))
        build = {"gpt2": self._byte_level, "llama": self._sentencepiece, "t5": self._unigram}.get(model)
        if build is None:
            known = "byte-level BPE ('gpt2'), SentencePiece ('llama') and Unigram ('t5')"
            self._refuse("tokenizer.ggml.model", f"{known}, and not {model[:80]!r}")
        self._build = build
        if model == "gpt2":
            name = fields.string("tokenizer.ggml.pre")
            if name not in SPLITTINGS:
                self._refuse("tokenizer.ggml.pre", f"{', '.join(SPLITTINGS)}, and not {name[:80]!r}")
            self._splitting = SPLITTINGS[name]
            self._assumed = TokenizerDefaults({}, adds_bos=self._splitting.adds_bos)
        else:
            self._assumed = _ASSUMED[model]

    def id(self, name: str) -> int | None:
        """Return the id of a special token."""
        field = f"tokenizer.ggml.{name}_token_id"
        if field not in self.fields:
            assumed = self._assumed.ids.get(name)
            return assumed if assumed is not None and assumed < len(self.tokens) else None
        found = self.fields.integer(field, least=0)
        if found >= len(self.tokens):
            self.fields.refuse(field, f"an id below {len(self.tokens)}")
        return found

    def endings(self) -> list[int]:
        """Return the tokens that end a response."""
        found = [self.id(name) for name in ("eos", "eot", "eom")]
        special = [i for token in ENDINGS if (i := self._ids.get(token)) is not None and self._is_special(i)]
        named = {self.tokens[i] for i in special}
        endings = dict.fromkeys([*(i for i in found if i is not None), *special])
        if named & _CALLS and named & _TURNS and _MESSAGE in named:
            del endings[self._ids[_MESSAGE]]
        return list(endings)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer, including BOS and EOS insertion."""
        try:
            made = self._build()
            made.add_tokens(list(self._added()))
            self._surround(made)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{self.file.path.name}: no tokenizer can be made of its metadata ({error}); {OTHERWISE}",
                field="tokenizer.ggml.model",
            ) from error
        return made

    def config(self) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {f"{name}_token": self.id(field) for name, field in names.items()}
        special = {name: self.tokens[i] for name, i in ids.items() if i is not None}
        templates = {
            found[1] or "default": text
            for field, text in self.file.metadata.items()
            if (found := _TEMPLATE.fullmatch(field)) and isinstance(text, str)
        }
        if [*templates] == ["default"]:
            return special | {"chat_template": templates["default"]}
        return special | {
            "chat_template": [{"name": name, "template": templates[name]} for name in templates]
        }

    def _byte_level(self) -> Tokenizer:
        """Build byte-level BPE with the pre-tokenisation of this name."""
        splitting = self._splitting
        bpe = models.BPE(self._ids, list(self._merges()), ignore_merges=splitting.ignores_merges)
        made = Tokenizer(bpe)
        if splitting.composes:
            made.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> Tokenizer:
        """Build BPE that merges the pair with the best-scored token, with byte fallback."""
        unknown = self.id("unknown")
        made = Tokenizer(
            models.BPE(
                self._ids,
                list(self._scored_merges()),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaced = normalizers.Replace(" ", _SPACE)
        words = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._adds_space:
            made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaced])
            made.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)])
        else:
            made.normalizer, made.decoder = spaced, decoders.Sequence(words)
        return made

    def _unigram(self) -> Tokenizer:
        """Build a unigram model; user-defined tokens have score 0."""
        scores = [
            0.0 if kind == _USER_DEFINED else score
            for score, kind in zip(self._scores(), self.kinds, strict=True)
        ]
        made = Tokenizer(models.Unigram(list(zip(self.tokens, scores, strict=True)), self.id("unknown")))
        steps: list[normalizers.Normalizer] = []
        if _CHARSMAP in self.fields:
            steps.append(normalizers.Precompiled(self._charsmap()))
        adds_space = self._adds_space
        if self.fields.flag("tokenizer.ggml.remove_extra_whitespaces", default=False):
            adds_space = True  # before every word
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
        if adds_space:
            steps.append(normalizers.Replace(Regex(r"\A(?= *[^ ])"), " "))
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
        made.decoder = decoders.Metaspace(prepend_scheme="always" if adds_space else "never")
        return made

    def _charsmap(self) -> bytes:
        """Return the normalisation rules; the library would panic at an offset outside them.

        They are the size of a double-array trie (darts-clone), its units, and the replacements it points to.
        """
        found, needs = self.fields.get(_CHARSMAP), "a double-array trie and the texts that it points to"
        if not isinstance(found, np.ndarray) or found.dtype.itemsize != 1:
            self.fields.refuse(_CHARSMAP, "bytes")
        data = found.tobytes()
        size = int.from_bytes(data[:4], "little")
        if size % 4 or size + 4 > len(data):
            self.fields.refuse(_CHARSMAP, needs)
        unit_N, text_B = (
            np.frombuffer(data, "<u4", size // 4, 4),
            np.frombuffer(data, np.uint8, offset=4 + size),
        )
        inner_N = unit_N >> 31 == 0
        inner_N[:1] = True  # the root
        children_N = np.arange(len(unit_N)) ^ (unit_N >> 10 << ((unit_N & 1 << 9) >> 6))
        fits = inner_N.any() and (children_N[inner_N] | 255 < len(unit_N)).all()
        value_N = unit_N[children_N[inner_N & (unit_N >> 8 & 1 == 1)]] & 0x7FFFFFFF if fits else unit_N
        if not fits or (value_N >= len(text_B)).any() or (text_B[value_N] >> 6 == 0b10).any():
            self.fields.refuse(_CHARSMAP, needs)
        return data

    def _surround(self, made: Tokenizer) -> None:
        """Add the post-processor that puts BOS and EOS around texts."""
        around = {
            name: self.tokens[token]
            for name, assumed in (("bos", self._assumed.adds_bos), ("eos", self._assumed.adds_eos))
            if self.fields.flag(f"tokenizer.ggml.add_{name}_token", default=assumed)
            and (token := self.id(name)) is not None
        }
        if around:
            begin, end = ([around[name]] if name in around else [] for name in ("bos", "eos"))
            made.post_processor = processors.TemplateProcessing(
                single=[*begin, "$A", *end],
                pair=[*begin, "$A", "$B", *end],
                special_tokens=[(token, self._ids[token]) for token in set(around.values())],
            )

    @property
    def _adds_space(self) -> bool:
        return self.fields.flag("tokenizer.ggml.add_space_prefix", default=self._assumed.adds_space)

    def _is_special(self, token: int) -> bool:
        return self.kinds[token] in (_UNKNOWN, _CONTROL, _USER_DEFINED)

    def _scores(self) -> list[float]:
        return self._numbers("tokenizer.ggml.scores", "fiu", "a number")

    def _numbers(self, field: str, kinds: str, what: str) -> list[Any]:
        found = self.fields.get(field)
        is_list = isinstance(found, np.ndarray) and found.dtype.kind in kinds
        if not is_list or len(found) != len(self.tokens) or not np.isfinite(found).all():
            self.fields.refuse(field, f"{what} for each of {len(self.tokens)} tokens")
        return list(found.tolist())

    def _refuse(self, field: str, needs: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file.path.name}: of tokenizers specdec reads {needs}; {OTHERWISE}", field=field
        )

    def _merges(self) -> Iterator[tuple[str, str]]:
        """Yield merges, except those with unknown tokens, which llama.cpp never applies."""
        if not isinstance(self.fields.get("tokenizer.ggml.merges"), GgufStrings):
            self.fields.refuse("tokenizer.ggml.merges", "a list of strings")
        for line in self.file.strings("tokenizer.ggml.merges"):
            cut = line.find(" ", 1)
            first, second = line[:cut], line[cut + 1 :]
            if cut > 0 and first in self._ids and second in self._ids and first + second in self._ids:
                yield first, second

    def _scored_merges(self) -> Iterator[tuple[str, str]]:
        """Yield every pair that merges into a token, best token first; of equal scores, the lower id."""
        for _, token in sorted(zip(self._scores(), self.tokens, strict=True), key=lambda pair: -pair[0]):
            for cut in range(1, len(token) if len(token) <= LONGEST else 0):
                if token[:cut] in self._ids and token[cut:] in self._ids:
                    yield token[:cut], token[cut:]

    def _added(self) -> Iterator[AddedToken]:
        for i, token in enumerate(self.tokens):
            if self._is_special(i):
                yield AddedToken(token, special=self.kinds[i] != _USER_DEFINED, normalized=False)
