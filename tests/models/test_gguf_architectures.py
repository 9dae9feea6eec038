"""Files of every architecture give the logits and head outputs of their source checkpoints."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.linear.integers import Integers
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights, read_network, unread_fields
from specdec.models.gguf import architectures
from specdec.models.gguf.architectures import DescribedFile
from specdec.models.gguf.file import GgufFile
from specdec.models.gguf.tensors import GgufTensors
from specdec.models.network import MTPHead
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.agreeing import CONFIGS
from tests.models.gguf_files import (
    ALL,
    NO_FORMS,
    WRITTEN,
    Config,
    Named,
    Written,
    block_of,
    is_matrix,
    num_layers,
    write,
)
from tests.models.gguf_mutations import refusals
from tests.models.random_checkpoints import Sample, edit_config, read_tensors, save
from tests.models.runner import CPU, Runner
from tests.selection import EXHAUSTIVE

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
VOCAB = 61


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the random checkpoint of an architecture once, and returns its path."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("folder")
            make(WRITTEN[name], made[name])
        return made[name]

    return folder


def make(own: Written, folder: Path, **change: Any) -> None:
    config = CONFIGS[own.family]()
    for name, value in {"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, **own.config, **change}.items():
        setattr(config, name, value)
    sample = Sample(own.family, 3, config, own.head, fused=False, sharded=False, multimodal=False)
    save(sample, folder)
    if limits := {name: value for name, value in own.config.items() if name.endswith("limit_list")}:
        edit_config(folder, **limits)


def read_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_file(own: Written, folder: Path, path: Path, forms: Mapping[str, str] = NO_FORMS) -> Path:
    return write(own, path, read_tensors(folder), read_config(folder), forms)


@torch.inference_mode()
def read(model: Path, *, head: bool = False) -> list[Tensor]:
    """Return the logits of some tokens, and the multi-token head's."""
    runner = Runner(model, torch.float32, mtp=head)
    own, tokens = runner.sequence(), [7 * i % VOCAB for i in range(24)]
    found = runner.step([(own, tokens[:-1])])
    if isinstance(runner.head, MTPHead):
        rows = [Row(TokenTree.chain(tokens[1:]), 0, own.table_N, own.state)]
        window = build_window(rows, runner.conv_width, CPU)
        found.append(runner.head.forward(window, own.hidden[0], runner.arena))
    return found


def differ(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number."""
    pairs = zip(found, expected, strict=True)
    return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


@pytest.mark.parametrize("name", WRITTEN)
def test_logits_equal_the_checkpoint(
    name: str, folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, head = folders(name), WRITTEN[name].head
    path = write_file(WRITTEN[name], folder, tmp_path / "small.gguf")
    assert differ(read(path, head=head), read(folder, head=head)) < 1e-5
    assert not [message for message in caplog.messages if "unknown fields" in message]
    assert not unread_fields(Checkpoint(path).config)


@pytest.mark.parametrize("name", WRITTEN)
def test_tensors_may_be_rounded_before_they_are_rearranged(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those that are computed from the file's are not."""
    tensors = GgufTensors(write_file(WRITTEN[name], folders(name), tmp_path / "small.gguf"))
    for disk in list(tensors.keys()):
        found, expected = tensors.get_tensor(disk, torch.bfloat16), tensors.get_tensor(disk)
        assert torch.equal(found.bfloat16(), expected.bfloat16()), disk


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "scaling", "keys"),
    [
        ("qwen3moe", YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 16}),
        (
            "qwen35moe",
            {**YARN, "partial_rotary_factor": 0.5, "beta_fast": 3.0, "beta_slow": 0.5},
            {
                **{"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_ext_factor": 1.0},
                **{"yarn_beta_fast": 3.0, "yarn_beta_slow": 0.5},
            },
        ),
        (
            "smollm3",
            {**YARN, "attention_factor": 1.5 * (0.1 * math.log(4) + 1)},
            {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 1.5},
        ),
        ("lfm2moe", {"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}),
        ("lfm2moe", {"rope_type": "linear", "factor": 2.5}, {"factor": 2.5}),
    ],
)
def test_positions_are_scaled_as_in_the_checkpoint(
    name: str, scaling: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Uses llama.cpp's keys for transformers' fields; the mutant is a file without them."""
    own = WRITTEN[name]
    make(own, folder := tmp_path / "folder", rope_parameters={"rope_theta": 1e4, **scaling})
    more = {f"{{}}.rope.scaling.{key}": value for key, value in keys.items()}
    scaled = replace(own, fields=lambda config: {**own.fields(config), **more})
    expected = read(folder)
    assert differ(read(write_file(scaled, folder, tmp_path / "scaled.gguf")), expected) < 1e-5
    assert differ(read(write_file(own, folder, tmp_path / "plain.gguf")), expected) > 1e-3


@pytest.mark.parametrize("experts", [0, 4])
@torch.inference_mode()
def test_granite_3_is_read_as_granite_4(experts: int, tmp_path: Path) -> None:
    """No family loads its folders, so transformers itself is the oracle."""
    kind = "GraniteMoe" if experts else "Granite"
    sizes = {"hidden_size": 48, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25}
    other = {"num_key_value_heads": 2, "logits_scaling": 0.5, "initializer_range": 0.15}
    moe = {"num_local_experts": experts, "num_experts_per_tok": min(experts, 2)}
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, **sizes, **scales, **other, **moe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}ForCausalLM")
        model = made._from_config(config, experts_implementation="eager").eval()
    told = {**config.to_dict(), "layer_types": ["full_attention"] * 2, "shared_intermediate_size": 0}
    own = WRITTEN["granitemoe" if experts else "granite"]
    model.save_pretrained(folder := tmp_path / "folder")
    path = write(own, tmp_path / "small.gguf", read_tensors(folder), told, {})
    tokens = [7 * i % VOCAB for i in range(23)]
    assert differ(read(path), [model(torch.tensor([tokens])).logits[0]]) < 1e-5


@pytest.mark.parametrize("name", ["smollm3", "qwen35moe", "falcon-h1", "bailingmoe3"])
def test_each_tensor_change_of_the_converter_matters(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """The mutant: a tensor left as in the checkpoint gives other logits."""
    folder, own, expected = folders(name), WRITTEN[name], read(folders(name))
    part = {"smollm3": "q_proj", "qwen35moe": "in_proj_z", "falcon-h1": "in_proj", "bailingmoe3": "A_log"}[
        name
    ]

    def change(disk: str, tensor: Tensor, config: Config) -> Named:
        for new, changed in own.change(disk, tensor, config):
            yield new, tensor.reshape(changed.shape) if part in disk else changed

    path = write_file(replace(own, change=change), folder, tmp_path / "small.gguf")
    assert differ(read(path), expected) > 1e-3


@pytest.mark.parametrize(
    ("forms", "bits"),
    [
        (("Q8_0", "Q8_0"), 8),
        (("Q4_0", "Q4_0"), 4),
        (("Q5_0", "Q5_0"), 6),
        (("Q8_0", "Q5_0"), None),
        (("Q4_1", "Q4_0"), None),
    ],
)
def test_experts_keep_their_integers(forms: tuple[str, str], bits: int | None, tmp_path: Path) -> None:
    """Gate and up form one matrix: if they are stored in different bits, both are widened."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    make(WRITTEN["qwen3moe"], folder := tmp_path / "folder", **sizes)
    forms_by_name = {"ffn_gate_exps": forms[0], "ffn_up_exps": forms[1]}
    path = write_file(WRITTEN["qwen3moe"], folder, tmp_path / "small.gguf", forms_by_name)
    network = read_network(checkpoint := Checkpoint(path))
    weights = open_weights(checkpoint, network, dtype=torch.float32)
    found = weights.matrix("layers.0.ffn.experts.up", (4, 64, 64))
    assert (found.bits if isinstance(found, Integers) else None) == bits
    assert isinstance(found, Integers | Tensor)
    wide_NK = found.expert(3).wide() if isinstance(found, Integers) else found[3]
    tensors = read_tensors(folder)
    for part, form, first in (("gate", forms[0], 0), ("up", forms[1], 32)):
        own = tensors[f"model.layers.0.mlp.experts.3.{part}_proj.weight"].numpy()
        kind = gguf.GGMLQuantizationType[form]
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(own, kind), kind))
        assert torch.equal(wide_NK[first : first + 32], expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_integers_count_as_the_numbers_that_they_stand_for(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Covers every matrix, after rows were reordered, and every expert."""
    own, folder, kind = WRITTEN[name], folders(name), gguf.GGMLQuantizationType["Q8_0"]

    def rounded(disk: str, tensor: Tensor, config: Config) -> Named:
        for new, changed in own.change(disk, tensor, config):
            if is_matrix(new, changed):
                blocks = gguf.quants.quantize(changed.contiguous().numpy(), kind)
                changed = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            yield new, changed

    path = write_file(own, folder, tmp_path / "integers.gguf", {ALL: "Q8_0"})
    wide = Checkpoint(write_file(replace(own, change=rounded), folder, tmp_path / "wide.gguf"))
    found = Checkpoint(path)
    kept = [name for name in wide.names() if f"{name}_scale" in found]
    for name in kept:
        scale_NG = found.tensor(f"{name}_scale").float()
        assert torch.equal(found.tensor(name) * scale_NG.repeat_interleave(32, 1), wide.tensor(name)), name
    assert len(kept) > 2
    read(path, head=own.head)  # with all tensors in place


def test_experts_with_gate_and_up_in_one_tensor(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The converter writes such files on request."""
    own, gates = WRITTEN["qwen3moe"], dict[str, Tensor]()

    def change(disk: str, tensor: Tensor, config: Config) -> Named:
        if "experts.gate_proj" in disk:
            gates[disk] = tensor
        elif "experts.up_proj" in disk:
            gate = gates[disk.replace("up_proj", "gate_proj")]
            yield f"blk.{block_of(disk)}.ffn_gate_up_exps.weight", torch.cat([gate, tensor], dim=1)
        else:
            yield disk, tensor

    path = write_file(replace(own, change=change), folders("qwen3moe"), tmp_path / "small.gguf")
    assert differ(read(path), read(folders("qwen3moe"))) < 1e-5


def test_a_head_without_tensors_is_none(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Some published files announce a head and lack it."""
    own, folder = WRITTEN["qwen3next"], folders("qwen3next")
    body = {name: own for name, own in read_tensors(folder).items() if not name.startswith("mtp.")}
    path = write(own, tmp_path / "small.gguf", body, read_config(folder), {})
    assert not read_network(Checkpoint(path)).mtp
    assert differ(read(path), read(folder)) < 1e-5


@pytest.mark.parametrize(
    ("name", "change", "field", "why"),
    [
        ("qwen3moe", {"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale", "needs 0 or 1"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func", "needs 0 or 1"),
        (
            "qwen3moe",
            {"expert_count": 3},
            "blk.0.ffn_down_exps.weight",
            "has 4 experts, and expert_count is 3",
        ),
        ("qwen3moe", {"attention.sliding_window": 64}, "qwen3moe.attention.sliding_window", "needs 0"),
        ("qwen3moe", {"router_logit_softcapping": 30.0}, "qwen3moe.router_logit_softcapping", "needs 0"),
        ("smollm3", {"use_parallel_residual": True}, "smollm3.use_parallel_residual", "needs 0"),
        ("smollm3", {"attention.value_length": 3}, "smollm3.attention.value_length", "as attention.key_len"),
        ("lfm2moe", {"expert_gating_func": 1}, "lfm2moe.expert_gating_func", "sigmoid"),
        ("granitehybrid", {"rope.scaling.finetuned": True}, "granitehybrid.rope.scaling.finetuned", "false"),
        ("granite", {"rope.dimension_count": 4}, "granite.rope.dimension_count", "whole heads"),
        ("granitehybrid", {"ssm.inner_size": 72}, "granitehybrid.ssm.inner_size", "embedding_length"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0]}, "jamba.attention.head_count_kv", "evenly spaced"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "mistral3.attention.temperature_scale", "needs 0"),
        ("bailingmoe3", {"swiglu_clamp_exp": [0.5]}, "bailingmoe3.swiglu_clamp_exp", "each of 3 layers"),
    ],
)
def test_what_is_not_read_is_named(
    name: str, change: dict[str, Any], field: str, why: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    own = WRITTEN[name]

    def fields(config: Config) -> dict[str, Any]:
        return {**own.fields(config), **{f"{{}}.{key}": value for key, value in change.items()}}

    path = write_file(replace(own, fields=fields), folders(name), tmp_path / "small.gguf")
    with pytest.raises(CheckpointError, match=why) as wrong:
        read(path)
    assert wrong.value.field == field


def test_unknown_fields_are_logged_once(
    folders: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = WRITTEN["smollm3"]

    def fields(config: Config) -> dict[str, Any]:
        return {**own.fields(config), "{}.vocab_size": VOCAB, "{}.b": 1, "{}.a\x1b[2J": [1, 2], "smollm.d": 1}

    path = write_file(replace(own, fields=fields), folders("smollm3"), tmp_path / "small.gguf")
    for _ in range(2):
        Checkpoint(path)
    assert caplog.messages == ["small.gguf: unknown fields of smollm3, ignored: b, a\\x1b[2J"]


def test_two_tensors_for_one_are_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    own = WRITTEN["granite"]

    def change(disk: str, tensor: Tensor, config: Config) -> Named:
        for new, changed in own.change(disk, tensor, config):
            yield new, changed
            if new == "blk.1.ffn_up.weight":
                yield "blk.1.ffn_up_shexp.weight", changed

    path = write_file(replace(own, change=change), folders("granite"), tmp_path / "small.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\S+ and blk\.1\.ffn_up\S+ are the same"):
        Checkpoint(path)


@pytest.mark.parametrize("name", ["qwen35moe", "mamba2", "mamba", "kimi-linear", "bailingmoe3"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf])
def test_decays_of_the_wrong_sign_are_refused(
    name: str, value: float, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their logarithm is NaN, which would spread to all logits."""
    own = WRITTEN[name]

    def change(disk: str, tensor: Tensor, config: Config) -> Named:
        for new, changed in own.change(disk, tensor, config):
            if "A_log" in disk or ".ssm_a" in new:
                changed.view(-1)[-1] = value
            yield new, changed

    path = write_file(replace(own, change=change), folders(name), tmp_path / "small.gguf")
    found = Checkpoint(path)
    decays = [disk for disk in found.names() if disk.endswith("A_log")]
    if value == (1.0 if name == "bailingmoe3" else -1.0):
        assert all(found.tensor(disk).isfinite().all() for disk in decays)
        return
    with pytest.raises(
        CheckpointError, match=r"blk\.\d\.ssm_a holds decays of 0, of the wrong sign"
    ) as wrong:
        found.tensor(decays[0])
    assert wrong.value.field.endswith("ssm_a")


@pytest.mark.parametrize("name", ["qwen35moe", "nemotron_h_moe", "bailingmoe3"])
def test_further_heads_are_left_out(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    own, folder = WRITTEN[name], folders(name)
    layers = num_layers(read_config(folder))

    def change(disk: str, tensor: Tensor, config: Config) -> Named:
        for new, changed in own.change(disk, tensor, config):
            yield new, changed
            if f".layers.{layers}." in new or new.startswith(f"blk.{layers}."):
                stem = f"model.layers.{layers + 1}." if ".layers." in new else f"blk.{layers + 1}."
                yield stem + new.split(f"{layers}.", 1)[1], changed

    def fields(config: Config) -> dict[str, Any]:
        more = {"{}.block_count": layers + 2, "{}.nextn_predict_layers": 2}
        return {**own.fields(config), **more}

    path = write_file(replace(own, change=change, fields=fields), folder, tmp_path / "small.gguf")
    assert differ(read(path, head=own.head), read(folder, head=own.head)) < 1e-5


def test_experts_are_bounded_as_a_whole(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may claim many experts in many blocks."""
    path = write_file(WRITTEN["qwen3moe"], folders("qwen3moe"), tmp_path / "small.gguf")
    total = sum(name.endswith("_proj.weight") and ".experts." in name for name in Checkpoint(path).names())
    for most in (total, total - 1):
        monkeypatch.setattr(architectures, "MOST_MATRICES", most)
        if most == total:
            DescribedFile(GgufFile(path))
            continue
        with pytest.raises(CheckpointError, match=rf"experts have more than {most} matrices"):
            DescribedFile(GgufFile(path))


def test_a_tied_output_of_falcon_is_refused(tmp_path: Path) -> None:
    """Its multiplier is then in no tensor."""
    make(WRITTEN["falcon-h1"], folder := tmp_path / "folder", tie_word_embeddings=True)
    path = write_file(WRITTEN["falcon-h1"], folder, tmp_path / "small.gguf")
    with pytest.raises(CheckpointError, match=r"it has no tensor output\.weight"):
        Checkpoint(path)


@pytest.mark.parametrize("count", [16, pytest.param(500, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_changed_field_or_tensor_is_refused_or_loads(
    name: str, count: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_file(WRITTEN[name], folders(name), tmp_path / "small.gguf")
    assert refusals(path, read, count, seed=name)
