"""Values that LFM3's configs leave to the reader, and the text model of LFM3-VL."""

from pathlib import Path
from random import Random

import torch
import transformers

from specdec.models import families, spec
from specdec.models.mixers import Attention
from specdec.models.rope import Rope
from specdec.models.shapes import SHAPES
from tests.models.drawn import DRAWN
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE


def test_defaults_equal_transformers() -> None:
    own, known = dict(SHAPES["lfm3-1.7b"]), transformers.Lfm3Config()
    for name in ("head_dim", "sliding_window", "conv_L_cache", "norm_eps", "tie_word_embeddings"):
        assert own.pop(name) == getattr(known, name)
    network = families.network(own)
    assert (
        network
        == families.network(SHAPES["lfm3-1.7b"])
        == families.network(known.to_dict() | {"eos_token_id": None})
    )
    assert network.layers[0].frame == network.layers[0].ffn_frame == spec.SANDWICH
    attention = {
        i: mixer for i, layer in enumerate(network.layers) if isinstance(mixer := layer.mixers[0], Attention)
    }
    assert [*attention] == [*range(2, 24, 2)]
    assert {i: layer.window for i, layer in attention.items()} == {
        i: None if i % 4 else 256 for i in attention
    }
    assert attention[2].rope == Rope(128, 1e6, turned=32, wide=True)
    assert attention[4].rope == Rope(128, 1e4, turned=64, wide=True)
    assert all(layer.head_gate for layer in attention.values())


def test_the_norms_epsilon_has_the_two_names_that_transformers_reads() -> None:
    own = {name: value for name, value in SHAPES["lfm3-1.7b"].items() if name != "norm_eps"}
    for name in ("norm_eps", "rms_norm_eps"):
        known = transformers.Lfm3Config.from_dict(own | {name: 1e-3})
        assert families.network(own | {name: 1e-3}).norm.eps == known.norm_eps == 1e-3


def test_the_text_part_of_a_vision_model_is_loaded(tmp_path: Path) -> None:
    text = DRAWN["lfm3"].draw(Random(1))
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Lfm3VlConfig(text_config=text.to_dict(), vision_config=vision)
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokens = [Random(i).randrange(text.vocab_size) for i in range(40)]
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens])).logits[0]
    found_TV = Runner(tmp_path, torch.float32, kernels="cpu").read(tokens, 7)
    assert relative(found_TV, expected_TV) < LOGITS_RELATIVE
