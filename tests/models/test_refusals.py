"""Configs of a known family that describe no valid network."""

from typing import Any

import pytest

from specdec.errors import CheckpointError
from specdec.models import families
from specdec.models.shapes import SHAPES


def test_biased_experts_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"mlp_bias is True.*without biases"):
        families.network(SHAPES["nemotron-h-8b"] | {"hybrid_override_pattern": "*E", "mlp_bias": True})


def test_unknown_family_lists_those_supported() -> None:
    with pytest.raises(
        CheckpointError, match=r"'mamba9' is not supported\. Supported: .*qwen3, .*nemotron_h"
    ) as e:
        families.network({"model_type": "mamba9"})
    assert "never runs" not in str(e.value)
    with pytest.raises(CheckpointError, match=r"code of its own, which specdec never runs"):
        families.network({"model_type": "mamba9", "auto_map": {"AutoModel": "modeling.Model"}})


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"hybrid_override_pattern": "-E"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "*E", "n_routed_experts": 4, "n_group": 4}, "n_group"),
        ({"hybrid_override_pattern": "*E", "n_group": 1, "topk_group": 3}, "topk_group"),
        (
            {
                "hybrid_override_pattern": "*E",
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 1,
                "num_experts_per_tok": 3,
            },
            "num_experts_per_tok",
        ),
    ],
)
def test_routing_that_cannot_work_is_refused(fields: dict[str, Any], culprit: str) -> None:
    experts = {"moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "n_shared_experts": 1}
    base = SHAPES["nemotron-h-8b"] | experts | {"n_routed_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(CheckpointError) as refused:
        families.network(base | fields)
    assert refused.value.field == culprit


def test_numbers_that_mean_nothing_are_refused() -> None:
    for fields, culprit in (({"rms_norm_eps": -1e-6}, "rms_norm_eps"), ({"rope_theta": 0.0}, "rope_theta")):
        with pytest.raises(CheckpointError, match=culprit):
            families.network({**SHAPES["tiny"], "rope_parameters": None, **fields})
