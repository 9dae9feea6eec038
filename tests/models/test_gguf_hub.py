"""GGUF files by model name, from a local hub."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.config.engine import EngineConfig
from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.files import GGUF, SINGLE
from specdec.models.folder import describable, find_folder
from specdec.models.gguf import folder as gguf_folder
from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.names import models, tagged, tags
from specdec.models.hub import headers
from specdec.models.hub.names import HubName
from specdec.setup.footprint import describe_model
from tests.models import test_hub
from tests.models.gguf_files import WRITTEN, add_fields, write_folder
from tests.models.hub_server import Hub, Repo
from tests.models.test_gguf import LLAMA, gguf

hub = test_hub.hub
NAME = "owner/small-GGUF"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "descriptions", lambda: tmp_path / "descriptions")


@pytest.fixture(scope="module")
def data(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Write a small model's file, with the divisors of Llama 3.1."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 1e4}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_parameters=scaling
    )
    scaled_N, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    divisors_N = 1e4 ** -(torch.arange(0, 16, 2) / 16) / scaled_N

    def extend(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors_N.numpy())

    folder = tmp_path_factory.mktemp("file")
    return write_folder("llama", checkpoint(LLAMA), folder / "small.gguf", extend=extend).read_bytes()


@pytest.fixture
def repo(hub: Hub, data: bytes) -> Repo:
    names = ("small-Q8_0", "small-BF16", "small-Q4_K_M", "small-UD-Q4_K_XL", "Q2/small-Q6_K")
    others = ("mmproj-Q4_K_M", "mtp-small-Q4_K_M", "small.imatrix")
    files = {f"{name}.gguf": data + bytes([i]) for i, name in enumerate((*names, *others))}
    hub.repos[NAME] = Repo({"config.json": b"{}", "README.md": b"x", **files})
    return hub.repos[NAME]


def link_of(folder: Path) -> Path:
    """Return the target of a folder's link to its GGUF file."""
    return (folder / GGUF).readlink()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b:Q4_K_M", ("a/b", "main", "Q4_K_M")),
        ("a/b@v1:UD-Q4_K_XL", ("a/b", "v1", "UD-Q4_K_XL")),
        *((f"{host}a/b:q8_0", ("a/b", "main", "q8_0")) for host in ("hf.co/", "https://huggingface.co/")),
        ("https:/huggingface.co/a/b/tree/v1:Q8_0", ("a/b", "v1", "Q8_0")),
        ("https://huggingface.co/a/b/resolve/main/x.gguf", ("a/b", "main", "x.gguf")),
        ("https://hf.co/a/b/blob/refs/pr/1/Q4/x y.gguf?download=true", ("a/b", "refs/pr/1", "Q4/x y.gguf")),
        *((text, None) for text in ("a:b", "a/b:", "a/b:c:d", "a/b:c/d", "a/b:../c", "./a/b:c")),
        ("https://hf.co/a/b/resolve/main/../x.gguf", None),
        ("https://hf.co/a/b/resolve/main/model.safetensors", None),
    ],
)
def test_tags_and_addresses_of_files(text: str, name: tuple[str, str, str] | None) -> None:
    found = HubName.read(text)
    assert found == name and (found is None or HubName.read(str(found)) in (found, None))


FILES = ("x-Q8_0.gguf", "x.IQ4_XS.gguf", "a/y-BF16-00001-of-00002.gguf", "a/y-BF16-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        *(("q8_0", FILES[0]), ("IQ4_XS", FILES[1]), ("bf16", FILES[2]), (FILES[3], FILES[3])),
        *((tag, None) for tag in ("F16", "Q8", "4_XS", "x-mmproj", "mmproj-F32.gguf")),
        (None, FILES[0]),
    ],
)
def test_a_tag_is_a_whole_word_of_a_name(tag: str | None, file: str | None) -> None:
    assert tagged((*FILES, "mmproj-F16.gguf", "x.txt"), tag) == file
    assert tagged(FILES[1:], None) == FILES[2] == models(FILES)[0]
    assert tags(FILES) == ["BF16", "Q8_0", "IQ4_XS"]


def test_names_of_heads_begin_with_their_kind() -> None:
    """Names of models with a head may contain it."""
    named = ("qwen3.6-27b-mtp-q4_k_m.gguf", "a/x-eagle3-trained.gguf")
    heads = (
        "mtp-x.gguf",
        "a/eagle3-x.gguf",
        "dflash-x.gguf",
        "dspark-x.gguf",
        "x.mmproj.gguf",
        "x.imatrix.gguf",
    )
    assert models((*named, *heads)) == sorted(named)


@pytest.mark.parametrize(
    ("given", "file"),
    [
        (NAME, "small-Q4_K_M.gguf"),
        (f"{NAME}:q8_0", "small-Q8_0.gguf"),
        (f"hf.co/{NAME}:UD-Q4_K_XL", "small-UD-Q4_K_XL.gguf"),
        (f"https://huggingface.co/{NAME}/blob/main/Q2/small-Q6_K.gguf", "Q2/small-Q6_K.gguf"),
    ],
)
def test_the_file_that_is_meant_is_downloaded_alone(
    given: str, file: str, hub: Hub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_folder(given)
    assert link_of(found).read_bytes() == repo.files[file] and found.name == Path(file).stem
    assert hub.fetched() == [file] and Checkpoint(found).names()
    assert find_folder(given) == found and hub.fetched() == [file]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_folder(given) == find_folder(NAME) == found, "what is cached is found"
    with pytest.raises(CheckpointError, match=r"small-GGUF:BF16 is not in .* HF_HUB_OFFLINE prevents"):
        find_folder(f"{NAME}:BF16")


def test_an_unknown_tag_is_answered_with_the_existing_ones(hub: Hub, repo: Repo) -> None:
    known = "Q6_K, BF16, Q4_K_M, Q8_0, UD-Q4_K_XL"
    with pytest.raises(CheckpointError, match=f"has no GGUF file Q5_K_M; of its files give one of {known}$"):
        find_folder(f"{NAME}:Q5_K_M")
    with pytest.raises(CheckpointError, match=r"specdec/tiny has no GGUF file Q8_0; it has none at all"):
        find_folder("specdec/tiny:Q8_0")
    assert not hub.fetched()


def test_all_parts_of_a_split_file_are_downloaded(
    hub: Hub, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    names = [f"part-Q4_K_M-{number:05}-of-00002.gguf" for number in (1, 2)]
    whole = gguf.GGUFReader(write_folder("llama", checkpoint(LLAMA), tmp_path / "whole.gguf"))
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.count", 2)
        if number == 0:
            add_fields(writer, WRITTEN["llama"], Checkpoint(checkpoint(LLAMA)).config)
        for tensor in whole.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    repo = hub.repos["a/b"] = Repo({name: (tmp_path / name).read_bytes() for name in names})
    with describable("a/b", EngineConfig()) as (folder, config):
        described = describe_model(folder, config, [64])
    found = find_folder("a/b")
    assert set(hub.fetched()) == {*names} and described == describe_model(found, config, [64])
    assert len(list(Checkpoint(found).names())) == len(whole.tensors)
    hub.status = 503
    assert find_folder("a/b") == found
    (link_of(found).parent / names[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"a/b is in the cache only in part: .* lacks {names[1]}, and"):
        find_folder("a/b")
    hub.status = None
    del repo.files[names[1]]
    with pytest.raises(CheckpointError, match=rf"a/b lacks {names[1]}"):
        find_folder("a/b")


def test_of_a_repository_with_both_the_tag_decides(hub: Hub, data: bytes) -> None:
    hub.repos["specdec/tiny"].files["small-Q8_0.gguf"] = data
    assert (find_folder("specdec/tiny") / SINGLE).is_file()
    assert link_of(find_folder("specdec/tiny:Q8_0")).name == "small-Q8_0.gguf"
    hub.status = 503
    assert (find_folder("specdec/tiny") / SINGLE).is_file()
    assert link_of(find_folder("specdec/tiny:Q8_0")).name == "small-Q8_0.gguf"


@pytest.mark.parametrize("first", [headers.FIRST_GGUF, 64, None])
def test_a_description_downloads_headers_alone(
    first: int | None, hub: Hub, repo: Repo, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request may cut the header anywhere, also just before its last tensor's type and offset."""
    if first is None:
        (tmp_path / "whole.gguf").write_bytes(data)
        first = GgufFile(tmp_path / "whole.gguf")._at - 10
    monkeypatch.setattr(headers, "FIRST_GGUF", first)
    repo.files["small-Q4_K_M.gguf"] += bytes(1 << 24)
    with describable(NAME, EngineConfig()) as (folder, config):
        described, rope = describe_model(folder, config, [64]), Checkpoint(folder).config["rope_parameters"]
    assert rope["rope_type"] == "llama3" and not folder.exists() and not gguf_folder.descriptions().exists()
    assert hub.sent < first * 5 + 100_000
    whole = find_folder(NAME)
    assert described == describe_model(whole, config, [64])
    with describable(NAME, EngineConfig()) as (folder, _):
        assert folder == whole


def test_divisors_of_a_wrong_shape_are_not_downloaded(
    hub: Hub,
    repo: Repo,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(headers, "FIRST_GGUF", 1 << 16)

    def extend(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", torch.ones(1 << 21).numpy())

    path = write_folder("llama", checkpoint(LLAMA), tmp_path / "large.gguf", extend=extend)
    repo.files["small-Q4_K_M.gguf"] = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"), describable(NAME, EngineConfig()):
        raise AssertionError
    assert hub.sent < 1 << 21


def test_a_header_without_an_end_is_given_up(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub may claim any size; a sparse file of that size was parsed as the rest of the header."""
    monkeypatch.setattr(headers, "FIRST_GGUF", 64)
    monkeypatch.setattr(headers, "LONGEST", 1000)
    for name in repo.files:
        field = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 1200)
        repo.files[name] = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(10_000)
    with pytest.raises(CheckpointError, match=r"Q4_K_M.gguf has a header of more than 1,000 bytes"):
        headers.find_headers(HubName(NAME), tmp_path)


def test_a_description_of_an_unread_type_downloads_no_more(
    hub: Hub, repo: Repo, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a truncated header is requested again."""
    from specdec.models.gguf import file

    monkeypatch.setattr(file, "TYPES", {})
    monkeypatch.setattr(headers, "FIRST_GGUF", len(data) - 1)
    asked: list[int] = []
    start = headers._start
    monkeypatch.setattr(headers, "_start", lambda url, count: asked.append(count) or start(url, count))
    with pytest.raises(CheckpointError, match="is stored as"):
        headers.find_headers(HubName(NAME), tmp_path)
    assert asked == [len(data) - 1]


def test_a_file_without_a_suffix_is_recognised_by_its_magic_bytes(data: bytes, tmp_path: Path) -> None:
    (blob := tmp_path / "sha256-0123").write_bytes(data)
    (tmp_path / "other").write_bytes(b"GGU")
    assert link_of(find_folder(blob)) == blob and list(Checkpoint(blob).names())
    with pytest.raises(CheckpointError, match="is not a folder"):
        find_folder(tmp_path / "other")


def test_a_folder_with_a_config_and_one_file_is_that_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "small-Q8_0.gguf").write_bytes(data)
    (tmp_path / "mmproj-F16.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    assert link_of(find_folder(tmp_path)).name == "small-Q8_0.gguf"
