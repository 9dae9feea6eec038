from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specdec.bench import random_model
from specdec.bench.random_model import byte_tokenizer, cached_checkpoint, shape_config
from specdec.errors import ConfigError

TEXT = "def f(x):\n\treturn 'né 你好 🎉'"


@pytest.mark.parametrize("vocabulary", [257, 300, 4096, 20001])
def test_tokenizer_has_text_for_every_id(vocabulary: int) -> None:
    tokenizer = byte_tokenizer(vocabulary)
    assert len(tokenizer) == vocabulary
    assert all(tokenizer.convert_ids_to_tokens(list(range(vocabulary))))


def test_tokenizer_gives_text_back(hybrid: Path) -> None:
    tokenizer = Tokenizer.from_file(str(hybrid / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_tokenizer_refuses_a_vocabulary_without_room() -> None:
    with pytest.raises(ConfigError, match="257"):
        byte_tokenizer(256)


def test_shape_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'huge'.*tiny"):
        shape_config("huge")


def test_cache_is_written_once_per_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = []

    def write(folder: Path, config: dict[str, object], *, seed: int) -> None:
        written.append(seed)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_model, "write_random_checkpoint", write)
    first = cached_checkpoint({"a": 1}, seed=0)
    assert first == cached_checkpoint({"a": 1}, seed=0)
    assert first.is_relative_to(tmp_path)
    assert len({first, cached_checkpoint({"a": 2}, seed=0), cached_checkpoint({"a": 1}, seed=1)}) == 3
    assert written == [0, 0, 1]


def test_cache_keeps_nothing_of_an_interrupted_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(folder: Path, config: dict[str, object], *, seed: int) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_model, "write_random_checkpoint", write)
    with pytest.raises(KeyboardInterrupt):
        cached_checkpoint({"a": 1}, seed=0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
