"""The named shapes, and random weights for them."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from specdec.models import families
from specdec.models.network import memory_layout
from specdec.models.shapes import SHAPES
from specdec.models.weights import RandomWeights
from tests.models.canonical import canonical


@pytest.mark.parametrize("name", SHAPES)
def test_named_shape_is_accepted_by_family_and_transformers(name: str) -> None:
    network = families.network(SHAPES[name])
    known = transformers.AutoConfig.for_model(**SHAPES[name])
    assert families.network(known.to_dict() | {"mtp_num_hidden_layers": len(network.mtp)}) == network
    assert families.stored_dtype(SHAPES[name]) in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "state_mib", "share"),
    [
        ("granite-4-h-small", 144, 0.012),
        ("falcon-h1-7b", 132, 0.006),
        ("falcon-mamba-7b", 34.9, 0.086),
        ("jamba-mini", 15.2, 0.086),
        ("zamba2-1.2b", 76.9, 0.012),
        ("zamba-7b", 37.6, 0.086),
        ("minimax-text-01", 279.9, 0.0118),
        ("kimi-linear-48b", 41.4, 0.0264),
        ("ling-3-flash", 72.4, 0.0264),
    ],
)
def test_states_and_records_are_as_large_as_is_known_of_them(
    name: str, state_mib: float, share: float
) -> None:
    figures = memory_layout(families.network(SHAPES[name]), torch.bfloat16).describe()
    assert state_mib < figures.state_bytes / 2**20 < 1.02 * state_mib
    assert figures.record_share == pytest.approx(share, abs=0.0006)


def test_random_weights_are_sane_and_repeatable() -> None:
    network = families.network(SHAPES["tiny"])
    weights = [RandomWeights(seed, torch.float32, norm_offset=1.0) for seed in (5, 5, 6)]
    for name, shape in canonical(network, mtp=True):
        first, same, other = (w.take(name, shape) for w in weights)
        assert first.shape == shape
        assert first.isfinite().all()
        assert torch.equal(first, same)
        if len(shape) > 1:
            assert not torch.equal(first, other)
            assert 0.9 < first.std() * shape[-1] ** 0.5 < 1.1
    scoped = weights[0].within("layers.0").within("mixer")
    assert torch.equal(scoped.take("A_log", (8,)), weights[1].take("layers.0.mixer.A_log", (8,)))
    assert (F.softplus(scoped.take("dt_bias", (99,))) > 9e-4).all()
    assert (weights[0].take("layers.0.mixer_norm.weight", (3,)) == 0).all()
    assert (scoped.take("norm.weight", (3,)) == 1).all()
    big = RandomWeights(0, torch.bfloat16).take("embed.weight", (6_000, 1_000))
    assert big.dtype == torch.bfloat16
    assert not torch.equal(big[0], big[4195]), "rows of a tensor longer than the noise differ"
