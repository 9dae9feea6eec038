"""Incremental detokenization: the pieces make up the whole, cut at the first stop string."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from specdec.errors import CheckpointError
from specdec.text.stops import StopNode
from specdec.text.tokenizer import (
    CONTEXT,
    TextPiece,
    TextStream,
    Tokenizer,
    TokenTextCutter,
    load_tokenizer,
    overlap,
)

BROKEN = "\N{REPLACEMENT CHARACTER}"
SAMPLES = (
    "hello world",
    "naïve café",
    "日本語の文章",
    "🙂👩‍👩‍👧🏳️‍🌈 ok",
    "\n\n  def f(x):\n",
    BROKEN,
    "a\x00b",
    "ﷺ𝔘𝔫𝔦",
)
BYTES = st.one_of(
    st.binary(max_size=24), st.text(max_size=24).map(str.encode), st.sampled_from(SAMPLES).map(str.encode)
)


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level BPE like GPT-2's, with merges that split characters, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(s) for s in SAMPLES]
    merges, vocab = [], {symbol: i for i, symbol in enumerate(alphabet)}
    for text, _ in (piece for sample in pieces for piece in sample):
        for left, right in zip(text[::2], text[1::2], strict=False):
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a vocabulary like SentencePiece's: words with a space marker, and byte tokens for the rest."""
    words = ["▁hello", "▁world", "▁", "a", "é", "▁a", "lo"]
    vocab = {piece: i for i, piece in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


INNER = byte_level()
TOKENIZER = Tokenizer(INNER)
SPECIAL = INNER.token_to_id("<|end|>")
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
SYMBOL_OF = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(HIDDEN)}
"""Characters for bytes in a byte-level vocabulary: printable ones unchanged, the others from 256 on."""
TOKEN_OF = {byte: INNER.token_to_id(symbol) for byte, symbol in SYMBOL_OF.items()}


def tokens_of(data: bytes, rng: random.Random) -> list[int]:
    """Encode bytes in tokens of one or two, also across characters, with silent tokens between them."""
    tokens, at = [], 0
    while at < len(data):
        if rng.random() < 0.1:
            tokens.append(rng.choice([SPECIAL, 10**6]))
        pair = INNER.token_to_id("".join(SYMBOL_OF[byte] for byte in data[at : at + 2]))
        if pair is not None and at + 1 < len(data) and rng.random() < 0.6:
            tokens.append(pair)
            at += 2
        else:
            tokens.append(TOKEN_OF[data[at]])
            at += 1
    return tokens


def pieces_of(
    tokens: list[int], stop: list[str] | str | None = None, tokenizer: Tokenizer = TOKENIZER
) -> list[str]:
    """Return a stream's pieces after each token, and at the end."""
    stream = TextStream(tokenizer, StopNode.of(stop))
    return [*(stream.push(token) for token in tokens), stream.finish()]


def cut(text: str, stops: list[str], *, after: int = 0) -> str:
    """Cut a text as if streamed by characters; stops that end within the first `after` are ignored."""
    for end in range(after + 1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return text


@given(st.lists(BYTES, max_size=8).map(b"".join), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_pieces_make_up_the_decoded_text(data: bytes, rng: random.Random) -> None:
    tokens = tokens_of(data, rng)
    assert "".join(pieces_of(tokens)) == TOKENIZER.decode(tokens) == data.decode(errors="replace")


def told(tokens: list[int], stop: list[str] | None, rng: random.Random) -> tuple[list[str], list[TextPiece]]:
    """Send a text now and then; return the sent texts and the pieces, with positions as origins."""
    stream, cutter, unsent = TextStream(TOKENIZER, StopNode.of(stop)), TokenTextCutter(), ""
    sent: list[str] = []
    pieces: list[TextPiece] = []
    for place, token in enumerate(tokens):
        unsent += stream.push(token)
        cutter.note(stream.length, place)
        if stream.stopped:
            break
        if rng.random() < 0.4:
            sent, pieces, unsent = [*sent, unsent], [*pieces, *cutter.cut(unsent)], ""
    unsent += stream.finish()
    return [*sent, unsent], [*pieces, *cutter.cut(unsent)]


@given(st.lists(BYTES, max_size=8).map(b"".join), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_pieces_are_what_each_token_wrote(data: bytes, rng: random.Random) -> None:
    tokens = tokens_of(data, rng)
    stream = TextStream(TOKENIZER)
    written = [stream.push(token) for token in tokens]
    sent, pieces = told(tokens, None, rng)
    assert "".join(piece.text for piece in pieces) == "".join(sent)
    for place, text in enumerate(written[:-1]):  # the last piece may end with an unfinished character
        assert "".join(piece.text for piece in pieces if piece.origin == place) == text


def test_pieces_held_back_for_a_stop_stay_their_tokens_own() -> None:
    tokens = [TOKEN_OF[byte] for byte in b"ab12x12345"]
    sent, pieces = told(tokens, ["1234"], random.Random(1))
    assert "".join(sent) == "ab12x"
    assert pieces == [TextPiece(letter, place) for place, letter in enumerate("ab12x")]


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_pieces_end_before_the_stop_that_is_complete_first(data: st.DataObject) -> None:
    """Few letters, so that stops overlap, nest, straddle tokens and begin without ending."""
    letters = st.sampled_from("ab\n日🙂")
    text = data.draw(st.text(letters, max_size=30))
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=3))
    rng = data.draw(st.randoms(use_true_random=False))
    tokens, stream = tokens_of(text.encode(), rng), TextStream(TOKENIZER, StopNode.of(stops))
    pieces, seen = [], ""
    for token in tokens:
        pieces.append(stream.push(token))
        seen = "".join(pieces)
        assert cut(text, stops).startswith(seen)
    assert seen + stream.finish() == cut(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_the_longest_prefix_of_a_stop_string_is_held_back(data: st.DataObject) -> None:
    letters = st.sampled_from("ab")
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=9), max_size=4))
    node, text = StopNode.of(stops), ""
    for sign in data.draw(st.text(letters, max_size=40)):
        node, text = node.after(sign), text + sign
        assert node.held == max((overlap(text, stop) for stop in stops), default=0)
        assert node.stop == max((s for s in stops if text.endswith(s)), key=len, default=None)


@pytest.mark.parametrize("count", [1, 64])
def test_a_character_costs_one_step_for_any_number_of_stop_strings(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All choices share the nodes: each is built once."""
    steps, after = 0, StopNode.after

    def counted(node: StopNode, sign: str) -> StopNode:
        nonlocal steps
        steps += 1
        return after(node, sign)

    monkeypatch.setattr(StopNode, "after", counted)
    root = StopNode.of(["a" * 500 + chr(0x4E00 + n) for n in range(count)])
    tokens = tokens_of(b"a" * 400, random.Random(1))
    for choice in range(3):
        stream = TextStream(TOKENIZER, root)
        assert "".join(map(stream.push, tokens)) == ""
        assert stream.finish() == "a" * 400
        # The first choice also finds each new node's fallback.
        assert steps <= 400 * (choice + 2)


@given(st.text(max_size=40), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_whole_characters_are_not_held_back(text: str, rng: random.Random) -> None:
    text = text.replace(BROKEN, "")
    stream, given_out, spelt = TextStream(TOKENIZER), "", b""
    for character in text:
        for token in tokens_of(character.encode(), rng):
            given_out += stream.push(token)
        spelt += character.encode()
        assert given_out == spelt.decode()


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", "STOP", ["one ", "", "", "", ""]),
        ("one STO two", "STOP", ["one ", "", "", "", "STO two"]),
        ("aab", "ab", ["", "a", ""]),
        ("abcabd", ["abd"], ["", "", "abc", "", "", ""]),
        ("xyz", ["yz", "z"], ["x", "", ""]),
    ],
)
def test_a_partial_stop_string_is_held_back_until_decided(
    text: str, stop: str | list[str], expected: list[str]
) -> None:
    stream = TextStream(TOKENIZER, StopNode.of(stop))
    pieces = [stream.push(TOKEN_OF[byte]) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == "".join(expected)
    if len(expected) == len(pieces):
        assert pieces == expected


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_stop_that_is_complete_too_early_is_text(data: st.DataObject) -> None:
    """One that begins too early is still a stop: only its end counts."""
    letters = st.sampled_from("ab日")
    text = data.draw(st.text(letters, max_size=30))
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=3))
    tokens = tokens_of(text.encode(), data.draw(st.randoms(use_true_random=False)))
    least = data.draw(st.integers(0, len(tokens)))
    early, stream, seen = TextStream(TOKENIZER), TextStream(TOKENIZER, StopNode.of(stops)), ""
    for token in tokens[:least]:
        early.push(token)
    wanted = cut(text, stops, after=early.length)
    for place, token in enumerate(tokens):
        seen += stream.push(token, may_stop=place >= least)
        assert wanted.startswith(seen)
    assert seen + stream.finish() == wanted


@pytest.mark.parametrize(
    ("text", "stop", "least", "expected"),
    [
        ("one STOP two STOP", "STOP", 7, "one "),
        ("one STOP two STOP", "STOP", 8, "one STOP two "),
        ("aaaaaa", "aaa", 4, "aa"),
        ("xcdefx", ["abcd", "cdefg", "cd"], 3, "xcdefx"),
    ],
)
def test_a_stop_may_begin_where_it_may_not_end(
    text: str, stop: str | list[str], least: int, expected: str
) -> None:
    stream = TextStream(TOKENIZER, StopNode.of(stop))
    tokens = enumerate((TOKEN_OF[byte] for byte in text.encode()), 1)
    pieces = [stream.push(token, may_stop=place > least) for place, token in tokens]
    assert "".join(pieces) + stream.finish() == expected


def test_a_stop_does_not_depend_on_how_tokens_cut_it() -> None:
    """The inner stop is complete first, even if one token completes both."""
    inner = byte_level()
    inner.add_tokens(["abcdef"])
    tokenizer = Tokenizer(inner)
    letters, whole = [TOKEN_OF[byte] for byte in b"abcdef"], [inner.token_to_id("abcdef")]
    for tokens in (letters, whole):
        assert "".join(pieces_of(tokens, ["abcdef", "cd"], tokenizer)) == "ab"


def test_a_stopped_stream_yields_no_more_text() -> None:
    stream = TextStream(TOKENIZER, StopNode.of("b"))
    assert [stream.push(TOKEN_OF[byte]) for byte in b"ab"] == ["a", ""]
    assert stream.stopped
    assert stream.push(TOKEN_OF[ord("c")]) == stream.finish() == ""


def test_finish_gives_what_was_held_once() -> None:
    stream = TextStream(TOKENIZER, StopNode.of("stop"))
    assert [stream.push(TOKEN_OF[byte]) for byte in b"ast\xf0\x9f"] == ["a", "", "", "", ""]
    assert stream.finish() == f"st{BROKEN}"
    assert stream.finish() == ""
    assert not stream.stopped


def test_endless_garbage_is_streamed() -> None:
    stream, longest = TextStream(TOKENIZER), 0
    given_out = ""
    for count in range(1, 200):
        given_out += stream.push(TOKEN_OF[0x80])
        longest = max(longest, count - len(given_out))
    assert longest <= 4
    assert given_out + stream.finish() == BROKEN * 199


def test_a_token_costs_the_decoding_of_a_bounded_window() -> None:
    class Counting(Tokenizer):
        longest = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    for data in (b"plain text " * 40, "日本🙂".encode() * 40, b"\xff" * 400, b"a\xe6\x97" * 100):
        tokenizer = Counting(INNER)
        pieces = pieces_of([TOKEN_OF[byte] for byte in data], tokenizer=tokenizer)
        assert "".join(pieces) == data.decode(errors="replace")
        assert tokenizer.longest <= 5 * CONTEXT


@given(
    st.lists(st.sampled_from(["▁hello", "▁world", "▁", "a", "é", "▁a", "lo", "日", "🙂", "ß"]), max_size=60)
)
@settings(deadline=None)
def test_spaces_and_multi_byte_characters_decode_with_byte_fallback(words: list[str]) -> None:
    """This decoder strips the first space and shows an invalid run of bytes byte for byte."""
    inner = byte_fallback()
    tokens = [
        inner.token_to_id(piece)
        for word in words
        for piece in (
            [word] if inner.token_to_id(word) is not None else [f"<0x{b:02X}>" for b in word.encode()]
        )
    ]
    tokenizer = Tokenizer(inner)
    pieces = pieces_of(tokens, tokenizer=tokenizer)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any(BROKEN in piece for piece in pieces)


def test_a_window_without_hold_back_is_caught() -> None:
    """Decoding each token alone, which works for plain words, breaks every multi-token character."""
    tokens = [TOKEN_OF[byte] for byte in "日本".encode()]
    assert "".join(TOKENIZER.decode([token]) for token in tokens) != "日本"
    assert "".join(pieces_of(tokens)) == "日本"


def test_bad_words_are_tokenised_as_given() -> None:
    """Inner blanks are significant; a leading one makes no difference."""

    def read(*words: str) -> set[str]:
        return {TOKENIZER.decode(ids) for word in words for ids in TOKENIZER.spellings(word)}

    assert read("foo") == read(" foo") == {"foo", " foo"}
    for word in ("\nfoo", "\tfoo", "  foo", "\n", "\n\n", " ", " \nfoo"):
        assert read(word) == {word}


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", SPECIAL)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("naïve 🙂")
    assert ids[0] == SPECIAL
    assert tokenizer.decode(ids) == "naïve 🙂"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "unheard-of"}}'])
def test_a_broken_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer .* download it again"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_do_not_apply_to_prompts(tmp_path: Path) -> None:
    """Training frameworks leave their truncation and padding in the file."""
    inner = byte_level()
    text = "a text of more than four tokens"
    expected = inner.encode(text).ids
    inner.enable_truncation(4)
    inner.enable_padding(length=80)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None and loaded.encode(text) == expected
