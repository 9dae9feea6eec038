import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from specdec import SpecEngine
from specdec.bench import random_model
from specdec.bench.random_model import (
    DRAFT,
    byte_tokenizer,
    cached_checkpoint,
    clear_drafts,
    shape_config,
    weight_bytes,
    write_random_checkpoint,
)
from specdec.errors import CapacityError, CheckpointError, ConfigError
from specdec.models.checkpoint import Checkpoint

TEXT = "def f(x):\n\treturn 'né 你好 🎉'"


@pytest.mark.parametrize("vocabulary", [257, 300, 4096, 20001])
def test_tokenizer_has_text_for_every_id(vocabulary: int) -> None:
    tokenizer = byte_tokenizer(vocabulary)
    assert len(tokenizer) == vocabulary
    assert all(tokenizer.convert_ids_to_tokens(list(range(vocabulary))))


def test_tokenizer_gives_text_back(hybrid: Path) -> None:
    tokenizer = Tokenizer.from_file(str(hybrid / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_tokenizer_refuses_a_too_small_vocabulary() -> None:
    with pytest.raises(ConfigError, match="257"):
        byte_tokenizer(256)


def test_shape_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'huge'.*tiny"):
        shape_config("huge")


TINY = shape_config("tiny")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Store random models in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specdec" / "random"


def test_cache_is_written_once_per_recipe(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    written = []

    def write(folder: Path, config: dict[str, object], *, seed: int) -> None:
        written.append(seed)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(random_model, "write_random_checkpoint", write)
    first = cached_checkpoint(TINY, seed=0)
    assert first == cached_checkpoint(TINY, seed=0)
    assert first.parent == cache
    other = {**TINY, "vocab_size": 512}
    assert len({first, cached_checkpoint(other, seed=0), cached_checkpoint(TINY, seed=1)}) == 3
    assert written == [0, 0, 1]


def test_cache_keeps_nothing_of_an_interrupted_write(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def write(folder: Path, config: dict[str, object], *, seed: int) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(random_model, "write_random_checkpoint", write)
    with pytest.raises(KeyboardInterrupt):
        cached_checkpoint(TINY, seed=0)
    assert list(cache.iterdir()) == []


def test_leftovers_of_killed_runs_are_removed_but_not_those_of_live_ones(cache: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    kept = [
        f"{DRAFT}{os.getpid()}-b",
        f"{DRAFT}1-c",
        f"{DRAFT}odd",
        "draft-otherhost-1-d",
        "0123456789abcdef",
    ]
    for name in (f"{DRAFT}{killed.pid}-a", *kept):
        (cache / name).mkdir(parents=True)
    clear_drafts(cache)
    assert {path.name for path in cache.iterdir()} == set(kept)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_model_that_does_not_fit_is_refused_before_drawing_weights(
    place: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    needed, free = weight_bytes(TINY), {"memory": 1 << 40, "disk": 1 << 40}
    free[place] = needed - 1
    monkeypatch.setattr(random_model, "free_memory", lambda device: free["memory"])
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free["disk"]))
    with pytest.raises(CapacityError, match=f"{needed:,} bytes.*{needed - 1:,} free.*smaller") as caught:
        cached_checkpoint(TINY, seed=0)
    assert caught.value.field == "shape"
    assert list(cache.iterdir()) == []


def test_weights_are_counted_in_their_written_format(cache: Path) -> None:
    folder = cached_checkpoint(TINY, seed=0)
    checkpoint = Checkpoint(folder)
    assert weight_bytes(TINY) == sum(checkpoint.info(name).bytes for name in checkpoint.names())


def test_writing_a_large_model_is_logged(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_model, "write_random_checkpoint", lambda folder, config, seed: None)
    cached_checkpoint(TINY, seed=0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(random_model, "LARGE", 1)
    folder = cached_checkpoint(TINY, seed=1)
    assert f"GB to {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: (folder / "model-mtp.safetensors").unlink(),
        lambda folder: (folder / "model-mtp.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
    ],
)
def test_damaged_random_model_is_to_be_deleted(damage: Callable[[Path], object], cache: Path) -> None:
    folder = cache / "0123456789abcdef"
    folder.mkdir(parents=True)
    write_random_checkpoint(folder, {**TINY, "num_hidden_layers": 4, "vocab_size": 300}, seed=0)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        SpecEngine(folder)
    assert f"delete {folder}" in str(caught.value) and "download" not in str(caught.value)
