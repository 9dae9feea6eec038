"""Published FP8 checkpoints give the logits of the same weights widened beforehand."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.errors import CheckpointError
from specdec.kernels.linear import fp8
from specdec.kernels.linear.fp8 import Fp8
from specdec.kernels.linear.matrix import Matrix, widen
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.weights import RandomWeights, Weights
from specdec.setup.footprint import describe_model
from tests.models.canonical import canonical
from tests.models.fp8_checkpoints import ODD, announce, edit, odd_sample, sample, write
from tests.models.random_checkpoints import Sample, draw, edit_config, read_tensors
from tests.models.runner import Runner
from tests.selection import EXHAUSTIVE
from tests.tolerances import FP8_LOGITS

TOKENS = [5, 57, 33, 7, 60, 2, 44, 18, 51, 9]

SAMPLES: dict[str, Callable[[], Sample]] = {
    "qwen3_next": lambda: sample("qwen3_next", mtp=True),
    "qwen3_5": lambda: sample("qwen3_5", multimodal=True),
    "qwen3_5_moe": lambda: sample("qwen3_5_moe"),
    "qwen3_5_moe, fused": lambda: sample("qwen3_5_moe", fused=True),
    "qwen3_next, odd": lambda: odd_sample("qwen3_next"),
    "qwen3_5_moe, odd": lambda: odd_sample("qwen3_5_moe"),
    "nemotron_h, odd": lambda: odd_sample("nemotron_h"),
    **{family: partial(draw, family, seed) for family, seed in ODD.items()},
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Return a function that writes a model and its widened twin once, and returns their paths."""
    base, written = tmp_path_factory.mktemp("fp8"), dict[str, Pair]()

    def pair_of(name: str) -> Pair:
        if name not in written:
            at = base / str(len(written))
            written[name] = at / "narrow", at / "wide"
            write(SAMPLES[name](), *written[name])
        return written[name]

    return pair_of


@pytest.fixture
def own(pair: Callable[[str], Pair], tmp_path: Path) -> Path:
    """Copy an FP8 model, to be changed."""
    return Path(shutil.copytree(pair("qwen3_next")[0], tmp_path / "own"))


def logits(folder: Path, kernels: str = "cpu") -> Tensor:
    return Runner(folder, torch.float32, kernels=kernels, slabs=2).read(TOKENS, 4)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", SAMPLES)
def test_logits_equal_those_of_the_widened_weights(
    name: str, kernels: str, pair: Callable[[str], Pair]
) -> None:
    narrow, wide = pair(name)
    assert distance(logits(narrow, kernels), logits(wide, "cpu")) < FP8_LOGITS


@EXHAUSTIVE
def test_triton_multiplies_by_narrow_weights(pair: Callable[[str], Pair]) -> None:
    """Windows of both kinds: one that fits a tile, and a prompt."""
    narrow, wide = pair("qwen3_5_moe, odd")
    found, expected = (
        Runner(folder, torch.float32, kernels=kernels, slabs=2)
        for folder, kernels in ((narrow, "triton"), (wide, "cpu"))
    )
    for tokens in (TOKENS[:3], [*TOKENS, *TOKENS]):
        assert distance(found.read(tokens, 32), expected.read(tokens, 32)) < FP8_LOGITS


def transposed(scale_MK: Tensor) -> Tensor:
    return scale_MK.T.reshape(scale_MK.shape)


def shifted(scale_MK: Tensor) -> Tensor:
    return scale_MK.roll(1, 1)


@pytest.mark.parametrize("mutate", [transposed, shifted])
@pytest.mark.parametrize(
    "tensor",
    [
        "0.linear_attn.in_proj_qkvz",
        "0.mlp.experts.1.up_proj",
        "1.self_attn.q_proj",
        "1.mlp.shared_expert.up_proj",
    ],
)
def test_scales_in_other_places_are_seen(
    tensor: str, mutate: Callable[[Tensor], Tensor], own: Path, pair: Callable[[str], Pair]
) -> None:
    name = f"model.layers.{tensor}.weight_scale_inv"
    edit(own, {name: mutate(read_tensors(own)[name])})
    assert distance(logits(own), logits(pair("qwen3_next")[1])) > 100 * FP8_LOGITS


def test_interleaved_projections_stay_narrow(pair: Callable[[str], Pair]) -> None:
    """Whole blocks move if heads have 128 rows; only tensors that no checkpoint quantizes stay wide."""
    weights = open_weights(pair("qwen3_next")[0])
    kinds = {name: type(take(weights, name, shape)) for name, shape in tensors(pair("qwen3_next")[0])}
    weights.finish()
    wide = {name.split(".", 2)[-1] for name, kind in kinds.items() if kind is not Fp8 and "layers" in name}
    assert "mixer.in_b.weight" in wide and "ffn.router.weight" in wide
    assert not wide & {"mixer.in_qkv.weight", "mixer.in_z.weight", "mixer.out.weight", "mixer.q.weight"}
    assert not wide & {"ffn.experts.up", "ffn.experts.down", "ffn.shared.up.weight"}


def test_widened_weights_are_logged_by_name(
    pair: Callable[[str], Pair], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        logits(pair("qwen3_next, odd")[0], "reference")
    assert "mlp.experts.0.gate_proj.weight" in caplog.text
    assert "self_attn" not in caplog.text


def tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    return list(canonical(families.read_network(Checkpoint(folder)), mtp=True))


def open_weights(folder: Path, **settings: Any) -> Any:
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint)
    return families.open_weights(
        checkpoint, network, dtype=torch.float32, mtp=True, progress=False, **settings
    )


EXACT = (
    "norm",
    "embed",
    "head",
    "conv",
    "A_log",
    "dt_bias",
    "in_a",
    "in_b",
    "router",
    "shared_gate",
    "mtp.fc",
)


def take(weights: Weights, name: str, shape: tuple[int, ...]) -> Matrix:
    """Take a tensor as the network does."""
    exact = any(word in name for word in EXACT)
    return weights.take(name, shape) if exact else weights.matrix(name, shape)


def test_weights_are_quantised_on_load_on_request(pair: Callable[[str], Pair]) -> None:
    wide = pair("qwen3_next")[1]
    plain, rounded = open_weights(wide), open_weights(wide, quantize=fp8)
    for name, shape in tensors(wide):
        expected, found = take(plain, name, shape), take(rounded, name, shape)
        if isinstance(found, Tensor):
            assert any(word in name for word in EXACT) and torch.equal(found, expected)
        else:
            assert torch.equal(widen(found), widen(fp8.quantise(expected)))
            assert distance(widen(found), expected) < 0.05


def test_nothing_is_rounded_twice(pair: Callable[[str], Pair]) -> None:
    """A matrix whose blocks had to be split keeps its exact values."""
    narrow, wide = pair("qwen3_next, odd")
    name, shape = next((n, s) for n, s in tensors(narrow) if n.endswith("ffn.experts.up"))
    found = open_weights(narrow, quantize=fp8).matrix(name, shape)
    assert torch.equal(found, open_weights(wide).take(name, shape))


def test_random_weights_are_drawn_in_eight_bits() -> None:
    narrow = RandomWeights(0, torch.bfloat16, quantize=fp8).matrix("layers.0.ffn.experts.up", (2, 256, 192))
    wide = RandomWeights(0, torch.bfloat16).take("layers.0.ffn.experts.up", (2, 256, 192))
    assert isinstance(narrow, Fp8) and narrow.dtype == torch.bfloat16
    assert distance(widen(narrow).float(), wide.float()) < 0.05
    assert 0.9 < widen(narrow).float().std() * 192**0.5 < 1.1


@pytest.mark.parametrize(
    "settings", [{"kernels": "cpu"}, {"kernels": "reference"}, {"quantize": "fp8"}], ids=str
)
def test_text_is_the_same_with_drafts_and_without(settings: Any, pair: Callable[[str], Pair]) -> None:
    folder = pair("qwen3_next")["quantize" in settings]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    common = {**settings, "device": "cpu", "dtype": "float32", "memory_bytes": 1 << 26, "max_model_len": 64}
    texts = []
    for drafts in (
        {"draft": "none"},
        {"draft": "auto", "num_steps": 2, "topk": 2, "num_draft_tokens": 5, "adaptive": False},
    ):
        with SpecEngine(str(folder), **common, **drafts) as engine:
            done = engine.generate([TOKENS], params)[0]
            texts.append(done.token_ids)
    assert len(texts[0]) == 12 and texts[0] == texts[1]
    assert done.stats.drafted > 0


def test_stored_and_resident_bytes_are_reported(pair: Callable[[str], Pair]) -> None:
    narrow, wide = pair("qwen3_next")
    config = {"device": "cpu", "dtype": "float32", "memory_bytes": 1 << 26, "draft": "mtp"}
    told = {
        (folder, kernels, quantize): describe_model(
            folder, EngineConfig(**config, kernels=kernels, quantize=quantize), [16]
        )
        for folder, kernels, quantize in (
            (narrow, "cpu", None),
            (narrow, "reference", None),
            (wide, "cpu", None),
            (wide, "reference", "fp8"),
        )
    }
    widened, kept, plain, rounded = told.values()
    files = [file.stat().st_size for file in narrow.glob("*.safetensors")]
    assert kept["stored_bytes"] == widened["stored_bytes"] == pytest.approx(sum(files), rel=0.02)
    assert plain["stored_8bit_bytes"] == 0 < kept["stored_8bit_bytes"] < kept["stored_bytes"]
    assert widened["weight_bytes"] == plain["weight_bytes"] > 2 * kept["weight_bytes"]
    assert kept["weight_bytes"] == rounded["weight_bytes"]
    assert kept["weight_bytes"] == pytest.approx(held_bytes(narrow), rel=1e-3)


def held_bytes(folder: Path) -> int:
    """Count the bytes of a network's weights, scales included, without the multi-token head."""
    weights, total = open_weights(folder), 0
    for name, shape in tensors(folder):
        if not name.startswith("mtp."):
            taken = take(weights, name, shape)
            parts = [taken] if isinstance(taken, Tensor) else [taken.weight_ND, taken.scale_MK]
            total += sum(part.numel() * part.itemsize for part in parts)
    return total


Change = Callable[[Path], object]
QKVZ = "model.layers.0.linear_attn.in_proj_qkvz.weight"
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
WRONG: list[tuple[Change, str, str]] = [
    (lambda f: edit(f, {f"{QKVZ}_scale_inv": None}), f"{QKVZ}_scale_inv", "the scales of"),
    (lambda f: edit(f, {f"{QKVZ}_scale_inv": torch.ones(2, 12)}), f"{QKVZ}_scale_inv", "make it [12, 2]"),
    (
        lambda f: edit(f, {f"{QKVZ}_scale_inv": torch.ones(12, 2, dtype=torch.int32)}),
        f"{QKVZ}_scale_inv",
        "stored as I32",
    ),
    *(
        (
            lambda f, bad=bad: edit(
                f, {f"{QKVZ}_scale_inv": torch.ones(12, 2).index_fill(0, torch.tensor(3), bad)}
            ),
            f"{QKVZ}_scale_inv",
            "not positive numbers",
        )
        for bad in (torch.nan, torch.inf, 0.0, -1.0)
    ),
    (lambda f: edit(f, {GATE: torch.ones(256, 256)}), GATE, "not stored as the experts before it"),
    (lambda f: edit(f, {QKVZ: torch.ones(1536, 256)}), f"{QKVZ}_scale_inv", "unexpected"),
    (lambda f: edit_config(f, quantization_config=None), QKVZ, "no quantization_config"),
    (lambda f: announce(f, quant_method="bitsandbytes"), "quantization_config.quant_method", "not quantised"),
    (lambda f: announce(f, fmt="e5m2"), "quantization_config.fmt", "'e4m3'"),
    (
        lambda f: announce(f, weight_block_size=[1, 128]),
        "quantization_config.weight_block_size",
        "[128, 128]",
    ),
    (lambda f: announce(f, weight_block_size=None), "quantization_config.weight_block_size", "not quantised"),
]


@pytest.mark.parametrize(("change", "culprit", "says"), WRONG)
def test_invalid_fields_are_refused_by_name(change: Change, culprit: str, says: str, own: Path) -> None:
    change(own)
    with pytest.raises(CheckpointError) as refused:
        Runner(own, torch.float32, slabs=2)
    assert culprit in str(refused.value) and says in str(refused.value)
    assert refused.value.field is not None
