"""A quantized copy next to its network equals that network loaded in INT4, and shares the other weights."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.draft.rounded import RoundedDrafter
from specdec.errors import CheckpointError
from specdec.kernels.linear.integers import INT4, Integers
from specdec.models.network import Network
from specdec.models.rounded import Nibbles
from specdec.setup.build import LoadedModel, build
from specdec.setup.footprint import describe_model, measure
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.fp8_checkpoints import edit
from tests.models.random_checkpoints import read_tensors

FAMILIES = ("qwen3", "qwen3_next", "qwen3_5_moe", "nemotron_h")
TEXT = [5, 17, 40, 3, 3, 28, 61, 9]


@pytest.mark.parametrize("shape", [(3, 64), (1, 1), (5, 33), (2, 3, 65)])
def test_two_4_bit_weights_share_a_byte_and_round_trip(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix = INT4.quantise(torch.randn(shape, generator=generator, dtype=torch.bfloat16))
    matrix.number_ND.view(-1)[:1] = -8
    kept = Nibbles.of(matrix)
    assert kept.pair_X.numel() == -(-matrix.number_ND.numel() // 2)
    again = kept.unpack()
    assert torch.equal(again.number_ND, matrix.number_ND) and torch.equal(again.scale, matrix.scale)
    assert (again.bits, again.dtype) == (4, torch.bfloat16)


def load(folder: Path, **fields: Any) -> tuple[LoadedModel, Network | None]:
    model = build(folder, EngineConfig(max_model_len=64, memory_bytes=1 << 22, adaptive=False, **fields))
    planned = model.loop.speculation.planned
    copy = planned.copy if isinstance(planned, RoundedDrafter) else None
    assert copy is None or isinstance(copy, Network)
    return model, copy


@torch.inference_mode()
def read(model: LoadedModel, network: Network) -> Tensor:
    """Run a text with a network in a model's memory."""
    arena = model.loop.arena
    blocks, state = arena.take_blocks("text", 1), 0
    assert blocks is not None
    if arena.layout.states:
        state = arena.take_state("text") or 0
    row = Row(TokenTree.chain(TEXT), 0, torch.tensor(blocks), state)
    window = build_window([row], arena.layout.conv_width, torch.device("cpu"))
    return network.logits(network.forward(window, arena))


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("float32", "reference")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_equals_the_network_loaded_in_4_bits(
    family_folder: Callable[..., Path], family: str, dtype: str, kernels: str
) -> None:
    """To the bit; the network itself is unchanged by its copy."""
    folder, given = family_folder(family), {"dtype": dtype, "kernels": kernels}
    (rounded, _), (plain, _) = (
        load(folder, draft="none", **given, **own) for own in ({"quantize": "int4"}, {})
    )
    both, copy = load(folder, draft="self-int4", **given)
    assert copy is not None
    assert torch.equal(read(both, copy), read(rounded, rounded.network))
    both.loop.arena.forget()
    wide_TV = read(both, both.network)
    assert torch.equal(wide_TV, read(plain, plain.network))
    assert not torch.equal(wide_TV, read(load(folder, draft="none", quantize="int4", **given)[0], copy))


def test_the_copy_shares_unquantised_weights(folder: Path) -> None:
    model, copy = load(folder, draft="self-int4")
    assert copy is not None
    assert copy.embed_VD is model.network.embed_VD and copy.rope is model.network.rope


def test_the_copy_of_8_bits_is_rounded_from_them(folder: Path) -> None:
    _, copy = load(folder, draft="self-int4", quantize="int8", kernels="reference")
    _, wide = load(folder, draft="self-int4", kernels="reference")
    assert copy and wide
    own, exact = (network.blocks[0].ffn.down.packed.parts[0] for network in (copy, wide))  # type: ignore[union-attr]
    assert isinstance(own, Integers) and isinstance(exact, Integers) and own.bits == exact.bits == 4
    assert (own.number_ND == exact.number_ND).float().mean() > 0.9


def test_the_copys_bytes_are_counted_as_allocated(folder: Path) -> None:
    """Integers by the bits of their packed layout, scales by their storage dtype."""
    model, copy = load(folder, draft="self-int4", kernels="reference", dtype="bfloat16")
    assert copy is not None
    held = [own for own in packed(copy) if isinstance(own, Integers)]
    counted = measure(model.network.spec, torch.bfloat16, copied=True)
    assert counted.copy_bytes == sum(
        (INT4 if own.bits == 4 else INT4.output).num_bytes(own.shape) for own in held
    )
    assert len({own.bits for own in held}) == 2


def test_a_copy_that_is_widened_is_counted_in_its_dtype(folder: Path) -> None:
    """Plain torch has no integer product: the copy is as wide as the model there."""
    _, copy = load(folder, draft="self-int4", kernels="reference", dtype="bfloat16")
    assert copy is not None
    rounded = [own for own in packed(copy) if isinstance(own, Integers)]
    config = EngineConfig(device="cpu", draft="self-int4", dtype="bfloat16", kernels="cpu")
    told = describe_model(folder, config, [16])["copy_bytes"]
    assert told == sum(2 * own.shape.numel() for own in rounded)


def test_stand_ins_of_a_broken_folder_are_not_rounded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken folder is refused first; an intact one is quantized."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    name = next(name for name in read_tensors(broken) if name.endswith("embed_tokens.weight"))
    edit(broken, {name: None})
    seen = []
    monkeypatch.setattr(Nibbles, "of", lambda matrix: seen.append(matrix.shape))
    with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
        load(broken, draft="self-int4")
    assert seen == []
    with pytest.raises(AttributeError):
        load(folder, draft="self-int4")
    assert seen


def test_a_model_without_a_copy_counts_none(folder: Path) -> None:
    model, _ = load(folder, draft="none")
    assert measure(model.network.spec, torch.bfloat16).copy_bytes == 0


def packed(network: Network) -> list[Any]:
    """List the parts of every packed matrix of a network."""
    from specdec.models.linear import Linear

    layers = [layer for block in network.blocks for layer in (*block.mixers, block.ffn) if layer]
    products = [var for layer in layers for var in vars(layer).values() if isinstance(var, Linear)]
    return [part for product in (*products, network.head) for part in product.packed.parts]
