"""Published integer checkpoints load without a second quantization, or are refused by name."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.errors import CheckpointError, ConfigError
from specdec.kernels.linear import integers
from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import expert_of, widen
from specdec.kernels.native import linear
from specdec.kernels.native.compiled import compiled
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.fields import Fields
from specdec.models.folder import SHIPPED
from specdec.models.heads import read_head
from specdec.models.packed import gptq
from specdec.setup import memory
from specdec.setup.footprint import describe_model
from tests.models.canonical import canonical
from tests.models.fp8_checkpoints import ODD, announce, edit
from tests.models.packed_checkpoints import DYNAMIC_INPUTS, LAYOUTS, compressed_group, sample, write
from tests.models.random_checkpoints import edit_config, read_tensors
from tests.models.rounded_kernels import rounded_kernels
from tests.models.runner import Runner
from tests.selection import EXHAUSTIVE
from tests.tolerances import KERNEL, PACKED_LOGITS, WIDENED_LOGITS

TOKENS = [5, 57, 33, 7, 60, 2, 44, 18, 51, 9]
HEADS = ("gptq", "awq")
"""Layouts in which the output matrix is packed too."""
FAMILIES = ("qwen3", "qwen3_5", "qwen3_5_moe")
SOME = ("gptq v2, asymmetric", "awq", "packed", "int8, mixed")
CASES = [
    *(("qwen3_next", layout) for layout in LAYOUTS),
    *((family, layout) for family in FAMILIES for layout in SOME),
    *(("nemotron_h", layout) for layout in ("packed", "int8, mixed")),
    *((family, layout) for family in ODD for layout in ("packed", "gptq v2, asymmetric")),
]
in_c = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
Pair = tuple[Path, Path]
Pairs = Callable[[str, str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Return a function that writes a model and its widened twin once, and returns their paths."""
    base, written = tmp_path_factory.mktemp("packed"), dict[tuple[str, str], Pair]()

    def pair_of(family: str, layout: str) -> Pair:
        if (family, layout) not in written:
            at = base / str(len(written))
            written[family, layout] = at / "narrow", at / "wide"
            own = sample(family, mtp=family == "qwen3_next")
            write(own, LAYOUTS[layout], *written[family, layout], head=layout in HEADS)
        return written[family, layout]

    return pair_of


def logits(folder: Path, kernels: Any) -> Tensor:
    return Runner(folder, torch.float32, kernels=kernels, slabs=2).read(TOKENS, 4)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_equal_those_of_the_widened_weights(
    family: str, layout: str, kernels: str, pairs: Pairs
) -> None:
    narrow, wide = pairs(family, layout)
    assert distance(logits(narrow, kernels), logits(wide, "cpu")) < WIDENED_LOGITS


@in_c
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_integer_products_equal_the_specification(family: str, layout: str, pairs: Pairs) -> None:
    """Plain torch with the same activation rounding differs only in summation order and expert routing."""
    narrow, _ = pairs(family, layout)
    assert distance(logits(narrow, "native"), logits(narrow, rounded_kernels())) < PACKED_LOGITS


@in_c
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed, asymmetric", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_rounded_rows_change_logits_little(family: str, layout: str, pairs: Pairs) -> None:
    narrow, wide = pairs(family, layout)
    assert distance(logits(narrow, "native"), logits(wide, "cpu")) < 0.06


@EXHAUSTIVE
def test_a_gpus_kernels_widen(pairs: Pairs) -> None:
    narrow, wide = pairs("qwen3_next", "awq")
    assert distance(logits(narrow, "triton"), logits(wide, "cpu")) < WIDENED_LOGITS


@in_c
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_exact_sums_of_the_stored_weights(layout: str, pairs: Pairs) -> None:
    """In float64, from the twin's weights, which our code did not unpack."""
    narrow, wide = pairs("qwen3_next", layout)
    found, twin = open_weights(narrow), open_weights(wide)
    whole = 0
    for name, shape in tensors(narrow):
        if len(shape) == 1 or any(word in name for word in EXACT):
            continue
        matrix, expected = found.matrix(name, shape), twin.matrix(name, shape)
        assert torch.equal(widen(matrix), expected)
        if isinstance(matrix, Tensor):
            continue
        own = expert_of(matrix, 1) if len(shape) == 3 else matrix
        assert isinstance(own, Integers)
        x_TD = torch.randn(3, shape[-1], generator=torch.Generator().manual_seed(0))
        number_TGI, scale_TG = integers.round_rows(x_TD)
        rounded_TD = (number_TGI.double() * scale_TG.double()[..., None]).flatten(1)[:, : shape[-1]]
        wide_ND = expected[1] if len(shape) == 3 else expected
        torch.testing.assert_close(
            linear.linear(x_TD, linear.pack(own)).double(),
            rounded_TD @ wide_ND.double().T,
            rtol=KERNEL[torch.float32],
            atol=KERNEL[torch.float32] * float(wide_ND.abs().max() * x_TD.norm()),
        )
        whole += 1
    assert whole >= 4


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


def tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    return list(canonical(families.read_network(Checkpoint(folder)), mtp=True))


def open_weights(folder: Path) -> Any:
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint)
    return families.open_weights(checkpoint, network, dtype=torch.float32, mtp=True, progress=False)


def swapped_nibbles(value: Tensor) -> Tensor:
    bytes_ = value.contiguous().view(torch.uint8)
    return (bytes_ >> 4 | bytes_ << 4).view(torch.int32)


def rolled(value: Tensor) -> Tensor:
    return value.roll(1, 0)


@pytest.mark.parametrize(
    ("layout", "suffix", "mutate"),
    [
        ("gptq", "qweight", swapped_nibbles),
        ("gptq v2, asymmetric", "qzeros", swapped_nibbles),
        ("gptq v2, asymmetric", "scales", rolled),
        ("awq", "qzeros", rolled),
        ("packed, asymmetric", "weight_zero_point", swapped_nibbles),
        ("packed", "weight_scale", rolled),
    ],
)
@pytest.mark.parametrize("layer", ["0.linear_attn.in_proj_qkvz", "0.mlp.experts.1.up_proj"])
def test_numbers_in_other_places_are_seen(
    layer: str, layout: str, suffix: str, mutate: Callable[[Tensor], Tensor], pairs: Pairs, tmp_path: Path
) -> None:
    narrow, wide = pairs("qwen3_next", layout)
    own, name = Path(shutil.copytree(narrow, tmp_path / "own")), f"model.layers.{layer}.{suffix}"
    edit(own, {name: mutate(read_tensors(own)[name])})
    assert distance(logits(own, "cpu"), logits(wide, "cpu")) > 100 * WIDENED_LOGITS


@in_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed, asymmetric", "int8, mixed"])
def test_text_is_the_same_with_drafts_and_without(layout: str, dtype: str, pairs: Pairs) -> None:
    """Bit-equal, in bfloat16 too: the multi-token head is packed like the network."""
    folder = pairs("qwen3_next", layout)[0]
    common = {"device": "cpu", "dtype": dtype, "memory_bytes": 1 << 26, "max_model_len": 64}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    said = []
    for drafts in (
        {"draft": "none"},
        {"draft": "mtp", "num_steps": 2, "topk": 2, "num_draft_tokens": 5, "adaptive": False},
    ):
        with SpecEngine(str(folder), **common, **drafts) as engine:
            assert engine.model.settings.kernels == "native"
            done = engine.generate([TOKENS], params)[0]
            said.append((done.token_ids, [own.logprob for own in done.logprobs or ()]))
    assert len(said[0][0]) == 12 and said[0] == said[1]
    assert done.stats.drafted > 0


def test_a_matrix_that_must_be_exact_is_widened_and_logged_by_name(
    pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow, wide = pairs("qwen3_next", "packed")
    own = Path(shutil.copytree(narrow, tmp_path / "own"))
    router = "model.layers.0.mlp.gate"
    matrix = read_tensors(wide)[f"{router}.weight"].half().float()
    numbers = (matrix.reshape(-1) * 0).view(matrix.shape)
    packed = torch.full((matrix.shape[0], matrix.shape[1] // 8), 0x11111111, dtype=torch.int32)
    scale = torch.full((matrix.shape[0], matrix.shape[1] // 32), 0.5, dtype=torch.bfloat16)
    parts = {"packed": packed, "scale": scale, "shape": torch.tensor(matrix.shape)}
    changed = {f"{router}.weight_{name}": value for name, value in parts.items()}
    edit(own, {f"{router}.weight": None, **changed})
    with caplog.at_level(logging.WARNING):
        found = open_weights(own)
        taken = found.take("layers.0.ffn.router.weight", tuple(matrix.shape))
    assert torch.equal(taken, numbers + (1 - 8) * 0.5)
    assert [*found._widened] == [f"{router}.weight"]


def test_idle_biases_are_left_and_others_are_not(pairs: Pairs, tmp_path: Path) -> None:
    """GPTQ's tools store zero biases for matrices that have none."""
    narrow, wide = pairs("qwen3", "gptq v2, asymmetric")
    own, name = Path(shutil.copytree(narrow, tmp_path / "own")), "model.layers.0.mlp.up_proj.bias"
    edit(own, {name: torch.zeros(384, dtype=torch.float16)})
    assert distance(logits(own, "cpu"), logits(wide, "cpu")) < WIDENED_LOGITS
    edit(own, {name: torch.ones(384, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=rf"1 unexpected: {name}"):
        logits(own, "cpu")


@in_c
@pytest.mark.parametrize(
    ("layout", "kernels", "says"),
    [
        ("gptq", "native", "gptq weights: used as stored"),
        ("awq", "cpu", "awq weights: widened to torch.float32"),
        ("int8", "native", "inputs are rounded to 8 bits in groups of 32, finer than config.json"),
    ],
)
def test_the_handling_of_weights_is_logged(
    layout: str, kernels: str, says: str, pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"device": "cpu", "dtype": "float32", "memory_bytes": 1 << 26, "max_model_len": 64}
    with caplog.at_level(logging.INFO), SpecEngine(str(pairs("qwen3", layout)[0]), kernels=kernels, **config):
        assert caplog.text.count(says) == 1


@in_c
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "packed by output", "int8", "int8, mixed"])
def test_stored_and_resident_bytes_are_reported(
    layout: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = pairs("qwen3_next", layout)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 26)
    config = {"device": "cpu", "dtype": "float32", "draft": "mtp", "max_running": 4096}
    kept, widened, plain = (
        describe_model(folder, EngineConfig(**config, kernels=kernels), [16])
        for folder, kernels in ((narrow, "native"), (narrow, "cpu"), (wide, "native"))
    )
    packed = {
        tensor.rpartition(".")[0]
        for tensor in read_tensors(narrow)
        if tensor.endswith(("scales", "weight_scale"))
    }
    held = sum(
        value.nbytes for name, value in read_tensors(narrow).items() if name.rpartition(".")[0] in packed
    )
    own = LAYOUTS[layout].bits
    assert kept[f"stored_{own}bit_bytes"] == held and kept[f"stored_{12 - own}bit_bytes"] == 0
    assert plain["stored_4bit_bytes"] == plain["stored_8bit_bytes"] == 0
    assert kept["weight_bytes"] == held_bytes(narrow)
    assert widened["weight_bytes"] == plain["weight_bytes"] > 2 * kept["weight_bytes"]
    assert kept["arena_bytes"] > widened["arena_bytes"]


def held_bytes(folder: Path) -> int:
    """Count the bytes of a network's weights, without the multi-token head."""
    weights, total = open_weights(folder), 0
    for name, shape in tensors(folder):
        if name.startswith("mtp."):
            continue
        exact = any(word in name for word in EXACT)
        taken = weights.take(name, shape) if exact else weights.matrix(name, shape)
        taken = weights.output(name, taken) if name == "head.weight" else taken
        if isinstance(taken, Tensor):
            total += taken.nbytes
            continue
        each = [taken.expert(e) for e in range(shape[0])] if len(shape) == 3 else [taken]
        for own in each:
            laid = linear.lay_whole(own)
            assert laid.outputs % linear.PANEL == 0
            total += laid.weight.nbytes + laid.scale.nbytes
    return total


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_integer_weights_are_not_requantised(quantize: str, pairs: Pairs) -> None:
    config = {"device": "cpu", "memory_bytes": 1 << 26, "quantize": quantize}
    with pytest.raises(ConfigError, match=r"quantize: .*\(awq\); leave '\w+' out") as refused:
        describe_model(pairs("qwen3", "awq")[0], EngineConfig(**config), [16])
    assert refused.value.field == "quantize"


Change = Callable[[Path], object]
MLP, FIRST = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj"


def change(suffix: str, make: Callable[[Tensor], Tensor | None], layer: str = MLP) -> Change:
    """Change one tensor of a layer."""
    name = f"{layer}.{suffix}"
    return lambda folder: edit(folder, {name: make(read_tensors(folder)[name])})


def of(**fields: Any) -> Change:
    return lambda folder: announce(folder, **fields)


def weights_of(**fields: Any) -> Change:
    group = compressed_group(4, 32)
    return of(config_groups={"group_0": {**group, "weights": {**group["weights"], **fields}}})


def group_of(**fields: Any) -> Change:
    return of(config_groups={"group_0": {**compressed_group(4, 32), **fields}})


def with_first(value: Tensor, number: float) -> Tensor:
    value = value.clone()
    value.view(-1)[0] = number
    return value


def without_list(**fields: Any) -> Change:
    """Remove the group index of each layer's inputs, and change the announced settings."""

    def spoil(folder: Path) -> None:
        change("g_idx", lambda _: None)(folder)
        announce(folder, **fields)

    return spoil


WRONG: list[tuple[str, Change, str, str]] = [
    ("gptq", change("qzeros", lambda _: None), f"{MLP}.qzeros", "a part of"),
    ("gptq", change("scales", lambda _: None), f"{MLP}.scales", "a part of"),
    ("gptq", change("qweight", lambda v: v[:-1]), f"{MLP}.qweight", "is [31, 384], config.json makes it [32"),
    ("gptq", change("scales", lambda v: v[:, :-8]), f"{MLP}.scales", "config.json makes it [2, 384]"),
    ("gptq", change("qweight", Tensor.float), f"{MLP}.qweight", "stored as F32, specdec reads I32"),
    ("gptq", change("scales", lambda v: with_first(v, torch.inf)), f"{MLP}.scales", "NaN or Inf"),
    ("gptq", change("qzeros", lambda v: with_first(v, 0x77777778)), f"{MLP}.qzeros", "announces symmetric"),
    ("gptq v1, asymmetric", change("qzeros", lambda v: with_first(v, 15)), f"{MLP}.qzeros", "'gptq_v2'"),
    ("gptq", change("g_idx", lambda v: v.flip(0)), f"{MLP}.g_idx", "desc_act false"),
    ("gptq", change("g_idx", lambda v: v[:-1]), f"{MLP}.g_idx", "[255]"),
    ("gptq", without_list(desc_act=True), f"{MLP}.g_idx", "a part of"),
    ("gptq", without_list(dynamic={r".*mlp\.gate_proj": {"desc_act": True}}), f"{MLP}.g_idx", "a part of"),
    ("gptq", of(dynamic={"-:.*mlp.*": {}}), f"{MLP}.qweight", "stored as integers, but"),
    ("gptq", of(dynamic={"-:(": {}}), "quantization_config.dynamic.-:(", "regular expression"),
    ("gptq", of(dynamic={".*mlp.*": {"bits": 3}}), "quantization_config.dynamic..*mlp.*.bits", "4 or 8 bits"),
    ("gptq", of(bits=3), "quantization_config.bits", "4 or 8 bits"),
    ("gptq", of(group_size=16), "quantization_config.group_size", "a multiple of 32"),
    ("gptq", of(group_size=0), "quantization_config.group_size", "a multiple of 32"),
    ("gptq", of(checkpoint_format="marlin"), "quantization_config.checkpoint_format", "'gptq_v2'"),
    ("gptq", of(is_marlin_format=True), "quantization_config.is_marlin_format", "the order of GPTQ"),
    ("gptq", of(pack_dtype="int64"), "quantization_config.pack_dtype", "'int32'"),
    (
        "gptq",
        of(quant_method="hqq"),
        "quantization_config.quant_method",
        "'gptq', 'awq', 'compressed-tensors'",
    ),
    ("gptq", lambda f: edit_config(f, quantization_config=None), f"{FIRST}.weight", "missing"),
    ("awq", of(version="gemv"), "quantization_config.version", "'gemm'"),
    ("awq", of(bits=8), "quantization_config.bits", "4 bits"),
    ("awq", of(backend="llm-awq"), "quantization_config.backend", "'autoawq'"),
    ("awq", of(zero_point=False), f"{MLP}.qzeros", "announces symmetric"),
    (
        "awq",
        of(modules_to_not_convert=["gate", "mlp.gate_proj"]),
        f"{MLP}.qweight",
        "stored as integers, but",
    ),
    ("awq", change("qweight", lambda v: v[:, 1:]), f"{MLP}.qweight", "is [256, 47]"),
    (
        "packed",
        of(format="float-quantized"),
        "quantization_config.format",
        "'pack-quantized' or 'int-quantized'",
    ),
    ("packed", of(format="marlin-24"), "quantization_config.format", "'pack-quantized'"),
    ("packed", of(format="nvfp4-pack-quantized"), "quantization_config.format", "'pack-quantized'"),
    ("packed", of(kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme", "keys and values"),
    ("packed", of(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format", "dense"),
    ("packed", of(transform_config={"config_groups": {"u": {}}}), "transform_config", "without transforms"),
    ("packed", of(config_groups={}), "quantization_config.config_groups", "groups of layers"),
    ("packed", of(ignore=["re:*"]), "quantization_config.ignore", "re:"),
    ("packed", of(ignore=[MLP]), f"{MLP}.weight_packed", "stored as integers, but"),
    ("packed", of(ignore=["re:.*mlp"]), f"{MLP}.weight_packed", "stored as integers, but"),
    ("packed", weights_of(num_bits=2), "group_0.weights.num_bits", "4 or 8 bits"),
    ("packed", weights_of(type="float"), "group_0.weights.type", "'int'"),
    ("packed", weights_of(dynamic=True), "group_0.weights.dynamic", "stored"),
    ("packed", weights_of(actorder="group"), "group_0.weights.actorder", "'static'"),
    ("packed", weights_of(strategy="tensor"), "group_0.weights.strategy", "'channel'"),
    ("packed", weights_of(strategy="block"), "group_0.weights.strategy", "'channel'"),
    ("packed", weights_of(group_size=48), "group_0.weights.group_size", "a multiple of 32"),
    ("packed", group_of(targets=["re:("]), "group_0.targets", "re:"),
    ("packed", group_of(format="nvfp4-pack-quantized"), "group_0.format", "'pack-quantized'"),
    ("packed", group_of(output_activations=DYNAMIC_INPUTS), "group_0.output_activations", "not rounded"),
    (
        "packed",
        group_of(input_activations={**DYNAMIC_INPUTS, "dynamic": False}),
        "group_0.input_activations.dynamic",
        "as they come",
    ),
    (
        "packed",
        group_of(input_activations={**DYNAMIC_INPUTS, "type": "float"}),
        "group_0.input_activations.type",
        "'int'",
    ),
    ("packed", change("weight_shape", lambda v: v + 1), f"{MLP}.weight_shape", "is [385, 257]"),
    ("packed", change("weight_scale", lambda v: v[:, 1:]), f"{MLP}.weight_scale", "[384, 8]"),
    (
        "packed",
        change("weight_scale", lambda v: torch.full(v.shape, 0.1)),
        f"{MLP}.weight_scale",
        "16 bits",
    ),
    (
        "packed, asymmetric",
        change("weight_zero_point", lambda _: None),
        f"{MLP}.weight_zero_point",
        "a part of",
    ),
    ("packed, asymmetric", weights_of(group_size=128), f"{FIRST}.weight_zero_point", "announces symmetric"),
    (
        "int8",
        weights_of(num_bits=4, strategy="channel", group_size=None),
        f"{FIRST}.weight",
        "more than 4 bits",
    ),
    ("int8", change("weight_scale", lambda _: None), f"{MLP}.weight", "stored as I8, specdec reads"),
]


@pytest.mark.parametrize(("layout", "spoil", "culprit", "says"), WRONG)
def test_unreadable_formats_are_refused_by_name(
    layout: str, spoil: Change, culprit: str, says: str, pairs: Pairs, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(pairs("qwen3", layout)[0], tmp_path / "own"))
    spoil(own)
    with pytest.raises(CheckpointError) as refused:
        Runner(own, torch.float32, slabs=2)
    assert culprit in str(refused.value) and says in str(refused.value)
    assert refused.value.field is not None


@pytest.mark.parametrize(
    ("layout", "spoil"),
    [
        ("gptq", of(desc_act=True)),
        ("gptq", without_list(desc_act=False)),
        ("gptq, 8 bits by output", without_list(desc_act=True)),
    ],
)
def test_consecutive_groups_are_accepted(layout: str, spoil: Change, pairs: Pairs, tmp_path: Path) -> None:
    """With the group list, or without one if there is one group or none was quantized in another order."""
    narrow, wide = pairs("qwen3", layout)
    own = Path(shutil.copytree(narrow, tmp_path / "own"))
    spoil(own)
    assert distance(logits(own, "cpu"), logits(wide, "cpu")) < WIDENED_LOGITS


def test_experts_packed_in_part_are_refused(pairs: Pairs, tmp_path: Path) -> None:
    narrow, wide = pairs("qwen3_5_moe", "packed")
    own = Path(shutil.copytree(narrow, tmp_path / "own"))
    layer = "model.layers.1.mlp.experts.2.gate_proj"
    parts = {f"{layer}.weight_{part}": None for part in ("packed", "scale", "shape")}
    edit(own, {**parts, f"{layer}.weight": read_tensors(wide)[f"{layer}.weight"]})
    with pytest.raises(CheckpointError, match=rf"{layer}\.weight is not stored as the experts before it"):
        Runner(own, torch.float32, slabs=2)


@pytest.mark.parametrize(
    "expression",
    [
        r"(\w+\.?)*$",
        "(.*.*)*x",
        "a" * 600,
        ".*.*.*.*.*x",
        r"(a)\1",
        "a{99999999999999999999}",
        "(" * 400,
        "[",
    ],
)
def test_expressions_that_may_take_long_are_refused(expression: str) -> None:
    """Expressions are from the folder, and so are the names they are matched with."""
    for config in ({"dynamic": {f"-:{expression}": {}}}, {"dynamic": {expression: {"bits": 4}}}):
        fields = Fields({"bits": 4, "group_size": 32, **config})
        with pytest.raises(CheckpointError, match="regular expressions of layers' names"):
            gptq.read_format(fields)


@pytest.mark.parametrize(
    ("expression", "left_out"),
    [
        (r".*layers\.\d+\.(self_attn|mlp)\..*", True),
        (r"model\.layers\.[0-9]+\.mlp", True),
        ("lm_head", False),
    ],
)
def test_usual_expressions_are_read(expression: str, left_out: bool) -> None:
    fields = Fields({"bits": 4, "group_size": 32, "dynamic": {f"-:{expression}": {}}})
    numbers = gptq.read_format(fields).scheme_of("model.layers.0.mlp.gate_proj")
    assert (numbers is None) == left_out


def test_an_integer_head_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED["tiny"] / "eagle3", tmp_path / "head")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    edit_config(tmp_path / "head", quantization_config=config)
    target = families.read_network(Checkpoint(SHIPPED["tiny"]))
    with pytest.raises(CheckpointError, match=r"draft_model: .*quantization_config .* 16 bits"):
        read_head(tmp_path / "head", target)
