"""Invalid model folders are refused with the culprit's name and a remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import CheckpointError
from specdec.models import checkpoint, families
from specdec.models.checkpoint import Checkpoint
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.heads import find_head, read_head
from tests.models.canonical import canonical
from tests.models.random_checkpoints import Sample, add_tensors, draw, edit_config, read_tensors, save

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one dense and one sharded mixture-of-experts checkpoint, to be copied by each test."""
    folder = tmp_path_factory.mktemp("checkpoints")
    hybrids = (draw("qwen3_5", seed) for seed in range(99))
    dense = next(s for s in hybrids if s.config.layer_types[0] == "linear_attention")
    save(Sample("qwen3_5", 0, dense.config, False, False, False, False), folder / "single")
    experts = draw("qwen3_5_moe", 1)
    save(Sample("qwen3_5_moe", 1, experts.config, False, False, True, False), folder / "sharded")
    return folder


@pytest.fixture
def single(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "single", tmp_path / "single"))


@pytest.fixture
def sharded(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "sharded", tmp_path / "sharded"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CheckpointWeights:
    """Take every tensor and finish."""
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint)
    weights = families.open_weights(checkpoint, network, dtype=dtype, progress=False)
    for name, shape in canonical(network, mtp=False):
        assert weights.take(name, shape).shape == shape
    weights.finish()
    return weights


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def only_pickles(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def not_a_number(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


BROKEN: list[tuple[Callable[[Path], object], str, str]] = [
    (shutil.rmtree, "model", "OWNER/NAME"),
    (lambda f: (f / "config.json").unlink(), "config.json", "give a folder with config.json"),
    (not_a_number, "config.json", "cannot be read as JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json", "must hold a JSON object"),
    (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json", "download it again"),
    (lambda f: (f / SINGLE).unlink(), SINGLE, "holds no weights"),
    (only_pickles, "pytorch_model.bin", "convert them to safetensors"),
    (lambda f: (f / SINGLE).rename(f / "weights.safetensors"), INDEX, f"rename a single file to {SINGLE}"),
    (lambda f: cut(f / SINGLE, -1), SINGLE, "not whole"),
    (lambda f: cut(f / SINGLE, 5), SINGLE, "download it again"),
    (lambda f: (f / SINGLE).write_bytes(b""), SINGLE, "0 bytes on disk"),
    (lambda f: (f / SINGLE).write_bytes(b"\xff" * 99), SINGLE, "header"),
    (
        lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        SINGLE,
        "git lfs pull",
    ),
]


@pytest.mark.parametrize(("damage", "culprit", "remedy"), BROKEN)
def test_broken_folder_is_refused_by_name(
    damage: Callable[[Path], object], culprit: str, remedy: str, single: Path
) -> None:
    Checkpoint(single)
    damage(single)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(single)
    assert refused.value.field == culprit
    assert remedy in str(refused.value)
    assert culprit in str(refused.value) or culprit == "model"


def test_a_file_that_memory_cannot_map_is_named(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 98248289275 bytes")

    monkeypatch.setattr(checkpoint, "safe_open", refuse)
    with pytest.raises(CheckpointError, match=rf"{SINGLE} cannot be mapped .*smaller shards"):
        Checkpoint(single)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_absent_shard_is_named(sharded: Path) -> None:
    shards(sharded)[2].unlink()
    with pytest.raises(CheckpointError, match=r"names model-00003-of-.*download the missing shard"):
        Checkpoint(sharded)


def test_truncated_shard_is_named(sharded: Path) -> None:
    cut(shards(sharded)[1], -7)
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* is not whole.*download it again"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", [SINGLE, "config.json", "generation_config.json"])
@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("gone")], ids=["folder", "link"])
def test_a_name_that_is_no_file_is_not_read_as_absent(
    name: str, make: Callable[[Path], None], single: Path
) -> None:
    (single / name).unlink(missing_ok=True)
    make(single / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a file, or a broken link") as caught:
        Checkpoint(single)
    assert caught.value.field == name


def test_shards_without_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(
        CheckpointError, match=rf"… and \d+ more but neither {SINGLE} nor {INDEX}; download the"
    ):
        Checkpoint(sharded)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_index_may_not_point_outside_the_folder(file: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(CheckpointError, match="which is not a file of this folder"):
        Checkpoint(sharded)


def test_index_without_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no weight_map; download it again"):
        Checkpoint(sharded)


def test_index_of_another_download_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.stray"] = shards(sharded)[0].name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"promises model\.stray in model-00001-.*fetch both again"):
        Checkpoint(sharded)


def test_code_of_a_checkpoint_is_never_run(single: Path) -> None:
    for file in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (single / file).write_text(f"open({str(single / 'ran')!r}, 'w')\n")
    edit_config(single, auto_map={"AutoConfig": "configuration_evil.C", "AutoModel": "modeling_evil.M"})
    load(single)
    edit_config(single, model_type="evil")
    with pytest.raises(CheckpointError, match="code of its own, which specdec never runs"):
        load(single)
    assert not (single / "ran").exists()


@pytest.mark.parametrize("spelling", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_is_parsed_in_both_spellings(spelling: str, single: Path) -> None:
    (single / "generation_config.json").write_text(f'{{"limit": [0.0, {spelling}], "other": {{"a": 1}}}}')
    assert Checkpoint(single).generation_config == {"limit": [0.0, float("inf")], "other": {"a": 1}}


def test_headers_are_read_without_the_tensors(sharded: Path) -> None:
    checkpoint, stored = Checkpoint(sharded), read_tensors(sharded)
    assert set(checkpoint.names()) == stored.keys()
    for name, value in stored.items():
        assert name in checkpoint
        assert checkpoint.shape(name) == tuple(value.shape)
        assert checkpoint.dtype(name) == value.dtype
        assert checkpoint.info(name).bytes == value.nbytes
        assert torch.equal(checkpoint.tensor(name), value)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or remove tensors of a single file; `__` in a name is a dot."""
    tensors = read_tensors(folder)
    for name, value in changes.items():
        tensors.pop(name := name.replace("__", "."), None)
        if value is not None:
            tensors[name] = value
    (folder / SINGLE).unlink()
    save_file(tensors, folder / SINGLE)


def test_one_error_names_every_tensor_at_fault(single: Path) -> None:
    rewrite(
        single,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(3, 5),
        model__layers__0__input_layernorm__weight=None,
        model__extra__weight=torch.zeros(1),
    )
    with pytest.raises(CheckpointError) as refused:
        load(single)
    message = str(refused.value)
    assert "2 missing: " in message and "model.norm.weight [" in message
    assert "model.layers.0.input_layernorm.weight [" in message
    assert "1 misshapen: model.layers.0.mlp.up_proj.weight is [3, 5], config.json makes it [" in message
    assert "1 unexpected: model.extra.weight" in message
    assert "\n" not in message
    assert "belong together" in message
    assert refused.value.field == "model.norm.weight"


def test_long_list_of_faults_is_cut_with_a_count(single: Path) -> None:
    add_tensors(single, {f"model.extra.{i:02}": torch.zeros(1) for i in range(31)})
    with pytest.raises(CheckpointError) as refused:
        load(single)
    assert "31 unexpected: model.extra.00, " in str(refused.value)
    assert "model.extra.02 … and 28 more; check that" in str(refused.value)
    assert "model.extra.03" not in str(refused.value)


def test_hostile_names_of_tensors_stay_on_one_short_line(single: Path) -> None:
    add_tensors(single, {f"model.\n{'a' * 5000}{i}": torch.zeros(1) for i in range(5)})
    with pytest.raises(CheckpointError) as refused:
        load(single)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1500


def test_missing_expert_is_named_as_on_disk(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    file = sharded / index["weight_map"].pop(name)
    tensors = Checkpoint(sharded)
    kept = {n: tensors.tensor(n).clone() for n, f in index["weight_map"].items() if f == file.name}
    file.unlink()
    save_file(kept or {"model.layers.0.unused": torch.zeros(1)}, file)
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"missing: {name} \["):
        load(sharded)


def test_quantised_tensor_is_refused(single: Path) -> None:
    norm = torch.zeros(Checkpoint(single).shape("model.norm.weight"))
    rewrite(single, model__norm__weight=norm.to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as F8_E4M3, specdec reads F64"):
        load(single)


def test_tensors_are_converted_and_owned(single: Path) -> None:
    checkpoint = Checkpoint(single)
    network = families.read_network(checkpoint)
    weights = families.open_weights(checkpoint, network, dtype=torch.bfloat16, progress=False)
    assert weights.has("layers.0.mixer.A_log") and not weights.has("layers.0.mixer.D")
    mixer = weights.within("layers.0").within("mixer")
    heads = checkpoint.shape("model.layers.0.linear_attn.A_log")
    a_log = mixer.take("A_log", heads, torch.float32)
    stored = checkpoint.tensor("model.layers.0.linear_attn.A_log")
    assert torch.equal(a_log, stored)
    a_log += 1
    assert torch.equal(a_log, stored + 1), "the file's pages were written to"
    assert mixer.take("dt_bias", heads).dtype == torch.bfloat16
    with pytest.raises(AssertionError, match="taken twice"):
        mixer.take("dt_bias", heads)


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_is_shown_on_a_terminal_or_when_asked(
    progress: bool | None, shown: bool, single: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpoint(single)
    network = families.read_network(checkpoint)
    weights = families.open_weights(checkpoint, network, dtype=torch.float32, progress=progress)
    for name, shape in canonical(network, mtp=False):
        weights.take(name, shape)
    weights.finish()
    out, err = capfd.readouterr()
    assert ("Loading weights: 100%" in err) == shown
    assert out == ""


NO_FOLDER = "is not a folder; give the path"
"""Part of the message about a missing path; a bare word may have been meant as a model name."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 5000, "is neither a folder nor a model that ships with specdec"),
        ("a/" * 3000, NO_FOLDER),
        ("a\x00b", NO_FOLDER),
        ("a\nb", NO_FOLDER),
        ("~" * 300, NO_FOLDER),
    ],
)
def test_names_that_no_file_system_takes_are_refused_as_any_other(
    name: str, words: str, single: Path
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        Checkpoint(name)
    assert refused.value.field == "model"
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
    assert find_head(name, "eagle", None) is None
    with pytest.raises(CheckpointError, match=f"^draft_model: .* {words}"):
        read_head(Path(name), families.read_network(Checkpoint(single)))


def test_an_index_may_name_a_file_at_any_length(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "a" * 5000}}))
    with pytest.raises(CheckpointError, match="which is not there; download the missing shard") as refused:
        Checkpoint(sharded)
    assert len(str(refused.value)) < 800
