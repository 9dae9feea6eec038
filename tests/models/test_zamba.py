"""Shared blocks: one set of weights, used by several layers; and other config spellings."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from specdec.errors import CheckpointError
from specdec.models import families, spec
from specdec.models.mixers import SharedBlock
from specdec.models.mixers.shared_block import LoadedSharedBlock
from specdec.models.network import Network
from specdec.models.shapes import SHAPES
from specdec.models.work import ReadingWork
from specdec.setup.footprint import measure
from tests.models.random_checkpoints import read_tensors
from tests.models.runner import Runner

FOLDERS = pytest.mark.parametrize("family", ["zamba2", "zamba"])
TOKENS = [5, 17, 40, 3, 3, 28, 61, 9]


def uses(network: spec.NetworkSpec) -> list[int]:
    return [i for i, layer in enumerate(network.layers) if layer.frame.side]


@pytest.mark.parametrize("kind", [transformers.Zamba2Config, transformers.ZambaConfig])
def test_default_layers_equal_transformers(kind: type[PreTrainedConfig]) -> None:
    config = kind()
    fields = config.to_dict()
    named = families.network(fields)
    assert uses(named) == [i for i, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    older = [kind.replace("linear_attention", "mamba") for kind in config.layers_block_type]
    for own in ({"layers_block_type": None}, {"layers_block_type": older}):
        assert families.network(fields | own) == named


def test_blocks_take_turns() -> None:
    network = families.network(SHAPES["zamba2-1.2b"] | {"num_mem_blocks": 2})
    assert [network.layers[i].shares for i in uses(network)] == [None, None, 5, 11, 5, 11]


@FOLDERS
def test_a_block_is_held_once_also_by_a_copy(family: str, family_folder: Callable[..., Path]) -> None:
    runner = Runner(family_folder(family), torch.float32, kernels="native", copied=True)

    def blocks(network: Network) -> list[LoadedSharedBlock]:
        mixers = (block.mixers[0] for block in network.blocks)
        return [mixer for mixer in mixers if isinstance(mixer, LoadedSharedBlock)]

    assert runner.copy is not None
    for network in (runner.network, runner.copy):
        first, *_, last = blocks(network)
        assert last.lent is first.lent and last.linear is not first.linear
        assert last.attention.out.packed is first.attention.out.packed
        assert last.attention.index != first.attention.index
    assert blocks(runner.copy)[0].lent is not blocks(runner.network)[0].lent


@FOLDERS
def test_shared_weights_count_once_in_memory_and_per_use_in_reads(
    family: str, family_folder: Callable[..., Path]
) -> None:
    folder = family_folder(family)
    network = Runner(folder, torch.float32).spec
    found, stored = measure(network, torch.float32), read_tensors(folder)
    assert found.weight_bytes == 4 * sum(tensor.numel() for tensor in stored.values())
    own = replace(network, layers=tuple(replace(layer, shares=None) for layer in network.layers))
    assert found.weight_bytes < measure(own, torch.float32).weight_bytes
    for tokens in (1, 7):
        assert found.step_bytes(tokens) == measure(own, torch.float32).step_bytes(tokens)
    assert ReadingWork.of(network) == ReadingWork.of(own)


@FOLDERS
def test_work_is_that_of_the_matrices_that_are_loaded(
    family: str, family_folder: Callable[..., Path]
) -> None:
    """Counts one multiply-add per token for each use, including its adapters."""
    network = Runner(family_folder(family), torch.float32).spec
    layer = network.layers[uses(network)[-1]]
    block = layer.mixers[0]
    assert isinstance(block, SharedBlock)
    alone = replace(network, layers=(replace(layer, shares=None, mixers=(block, layer.mixers[1])),))
    without = replace(network, layers=(spec.LayerSpec(layer.mixers[1:], None),))
    matrices, rest = (
        sum(
            p.count
            for p in measure(own, torch.float32).target
            if p.name.endswith("weight") and "norm" not in p.name
        )
        for own in (alone, without)
    )
    flops = ReadingWork.of(alone).per_token - ReadingWork.of(without).per_token
    assert flops == 2 * (matrices - rest)


def test_another_block_and_another_uses_adapter_are_seen(family_folder: Callable[..., Path]) -> None:
    """Layers 0, 2 and 3 use blocks 0, 1 and 0: the third use is given the first's and the second's."""
    right = Runner(family_folder("zamba2"), torch.float32)
    expected_TV = right.read(TOKENS, 3)
    first, second, third = (right.network.blocks[i].mixers[0] for i in (0, 2, 3))
    assert all(isinstance(block, LoadedSharedBlock) for block in (first, second, third))
    for name, other in (("ffn", first), ("linear", first), ("ffn", second)):
        own = getattr(third, name)
        setattr(third, name, getattr(other, name))
        assert not torch.allclose(right.read(TOKENS, 3), expected_TV, atol=1e-3), name
        setattr(third, name, own)
    assert torch.equal(right.read(TOKENS, 3), expected_TV)


def test_blocks_that_are_not_shared_are_refused_by_their_names(tmp_path: Path) -> None:
    """Zamba2 of transformers shares no block in a model whose output head is untied."""
    config = transformers.Zamba2Config(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=2,
        layers_block_type=["hybrid", "hybrid"],
        num_attention_heads=4,
        intermediate_size=20,
        adapter_rank=2,
        n_mamba_heads=4,
        tie_word_embeddings=False,
    )
    transformers.Zamba2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\.shared_transformer"):
        Runner(tmp_path, torch.float32)
