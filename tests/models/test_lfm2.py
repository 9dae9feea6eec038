"""Values that LFM2's configs leave to the reader: widths, layer kinds and tying; and its state sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

from specdec.config.engine import EngineConfig
from specdec.models import families
from specdec.models.feed_forward import MLP
from specdec.models.mixers import Attention, ShortConv
from specdec.models.shapes import SHAPES
from specdec.setup.footprint import describe_model
from tests.models.drawn import lfm2
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE

SMALL: Mapping[str, Any] = {**SHAPES["lfm2-350m"], "hidden_size": 32, "num_hidden_layers": 3}
SMALL = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv"] * 3}


@pytest.mark.parametrize("width", [100, 6656, 12288])
@pytest.mark.parametrize("multiple", [1, 96, 256])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_the_width_is_adjusted_as_the_reference_does(width: int, multiple: int, factor: float) -> None:
    fields = {"intermediate_size": width, "block_multiple_of": multiple, "block_ffn_dim_multiplier": factor}
    ffn = families.network({**SMALL, **fields}).layers[0].ffn
    own = transformers.Lfm2Config(**{**SMALL, **fields})
    known = transformers.models.lfm2.modeling_lfm2.Lfm2MLP(own)
    assert isinstance(ffn, MLP) and ffn.width == known.w1.out_features


def test_older_spellings_say_the_same() -> None:
    """`block_ff_dim`, `full_attn_idxs`, `tie_embedding`; a null multiplier leaves the width unchanged."""
    modern = {**SMALL, "layer_types": ["conv", "full_attention", "conv"]}
    network = families.network(modern)
    assert [type(layer.mixers[0]) for layer in network.layers] == [ShortConv, Attention, ShortConv]
    older = {**modern, "full_attn_idxs": [1], "block_ff_dim": 6656, "rope_theta": 1e6, "intermediate_size": 9}
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings"):
        del older[name]
    assert families.network(older) == network and network.tied
    assert families.network({**older, "tie_embedding": False}) == replace(network, tied=False)
    assert families.network({**modern, "tie_embedding": False}) == replace(network, tied=False)
    everywhere = families.network({**older, "full_attn_idxs": None})
    assert all(isinstance(layer.mixers[0], Attention) for layer in everywhere.layers)
    unscaled = families.network({**modern, "block_ffn_dim_multiplier": None}).layers[0].ffn
    assert isinstance(unscaled, MLP) and unscaled.width == int(2 * 6656 / 3)


def test_states_are_windows_and_records_their_next_inputs(family_folder: Callable[..., Path]) -> None:
    """Two inputs of 32 float32 channels are cached: a record adds one, and no part of a state."""
    told = describe_model(family_folder("lfm2"), EngineConfig(device="cpu", memory_bytes=1 << 20), [16])
    assert told["layers"] == {"short convolution": 2, "attention": 1, "dense feed-forward": 3}
    assert told["state_bytes"] == 2 * 2 * 32 * 4 and told["record_bytes"] == 2 * 32 * 4
    assert told["record_share"] == 0
    published = families.network(SHAPES["lfm2-8b-a1b"])
    windows = [mixer.state_shape() for mixer in published.mixers() if isinstance(mixer, ShortConv)]
    assert sum(window.conv_inputs * window.channels * 2 for window in windows if window) == 144 * 1024


def test_the_text_part_of_a_vision_model_is_loaded(tmp_path: Path) -> None:
    text = lfm2.draw(Random(2))
    vision = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Lfm2VlConfig(
        text_config=text,
        vision_config={"model_type": "siglip2_vision_model", **vision},
        projector_hidden_size=8,
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Lfm2VlForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = list(range(3, 40))
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
    found_TV = Runner(tmp_path, torch.float32, kernels="cpu").read(tokens, 7)
    assert relative(found_TV, expected_TV) < LOGITS_RELATIVE
