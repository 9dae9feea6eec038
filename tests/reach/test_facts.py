"""Engines that differ in a relevant setting have different fingerprints, and the difference is named."""

import json
import shutil
from pathlib import Path

import pytest

from specdec import EngineConfig
from specdec.models.folder import SHIPPED
from specdec.reach.fingerprint import digest_checkpoint, facts_of
from specdec.reach.protocol import differences, hash_facts
from specdec.setup.resolve import open_model

TINY = SHIPPED["tiny"]


def facts(**fields: str) -> dict[str, str]:
    opened = open_model(TINY, EngineConfig(**{"memory_bytes": 64 << 20, "dtype": "float32"} | fields))
    return facts_of(TINY, opened.network, opened.settings)


def copied(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder)
    return folder


def test_a_copy_is_the_same_and_one_changed_tensor_is_not(tmp_path: Path) -> None:
    same = copied(tmp_path / "same")
    assert digest_checkpoint(same) == digest_checkpoint(TINY)
    path = same / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    last = max(load["data_offsets"][0] for load in json.loads(data[8 : 8 + size]).values() if "dtype" in load)
    data[8 + size + last + 3] ^= 1
    path.write_bytes(data)
    assert digest_checkpoint(same) != digest_checkpoint(TINY)
    other = copied(tmp_path / "other")
    (other / "config.json").write_text((TINY / "config.json").read_text() + "\n")
    assert digest_checkpoint(other) != digest_checkpoint(TINY)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"draft": "none"}, {"draft head", "layout.kv"}),
        ({"draft": "mtp"}, set()),
        ({"dtype": "float64"}, {"layout.dtype", "layout.kv_dtype"}),
        ({"quantize": "int8"}, {"quantize"}),
        ({"quantize": "int8", "kernels": "cpu"}, {"quantize"}),  # quantized, then widened
        ({"kv_dtype": "fp8"}, {"layout.kv_dtype"}),
    ],
)
def test_what_differs_is_named(other: dict[str, str], named: set[str]) -> None:
    first, second = facts(), facts(**other)
    assert {name for name in first if first[name] != second[name]} >= named
    assert (hash_facts(first) == hash_facts(second)) == (not named)
    for name in named:
        assert f"{name} is {second[name]} there and {first[name]} here" in differences(second, first)
