"""EAGLE heads equal plain torch in every published layout and refuse unknown features by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from specdec.bench.random_eagle import eagle_config, eagle_tensors, write_eagle, write_random_eagle
from specdec.draft.drafter import DraftRequest
from specdec.draft.head import HeadDrafter
from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle_head import EagleHead
from specdec.models.families import read_network
from specdec.models.heads import find_head, read_head
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.agreeing import VOCAB
from tests.models.eagle_oracle import Oracle
from tests.models.random_checkpoints import draw, save
from tests.models.runner import CPU, Runner
from tests.tolerances import FLOAT64_LOGITS, LOGITS_RELATIVE

TEXT = [5, 17, 40, 3, 3, 28, 61, 9, 12, 33, 7, 50, 2, 2, 19, 44, 8, 30, 21, 6, 11, 11, 57, 4]
DRAFT = [13, 25, 37]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
IDS = "eagle_aux_hidden_state_layer_ids"
TAPS = {IDS: [0, 1, 2]}


@dataclass(frozen=True)
class Published:
    """A published kind of head: fields of the config, and the change to the drawn tensors."""

    kind: str
    fields: Mapping[str, Any]
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    nests: bool = False
    """Whether the layers' fields are nested, as speculators writes them."""


def renamed(old: str, new: str, prefix: str = "") -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {
        (name if name in ("lm_head.weight", "d2t", "t2d") else prefix + name).replace(old, new): value
        for name, value in tensors.items()
    }


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def with_biases(layer: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Add biases as in heads of Qwen2's kind: to queries, keys and values, not to the output."""

    def add(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [f"{layer}.self_attn.{n}_proj" for n in "qkv"]
        return tensors | {f"{n}.bias": torch.linspace(-1, 1, len(tensors[f"{n}.weight"])) for n in names}

    return add


def with_embedding(width: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    drawn = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(3))
    return lambda tensors: tensors | {"embed_tokens.weight": drawn}


def drawn(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Add tensors of these shapes; vectors are weights of norms."""
    generator = torch.Generator().manual_seed(5)
    added = {n: 0.15 * torch.randn(s, generator=generator) + (len(s) == 1) for n, s in shapes.items()}
    return {**tensors, **added}


def with_stream_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return drawn(tensors, {f"fc_norm.{i}.weight": (32,) for i in range(3)})


def with_two_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add layers 1 and 2: ordinary ones, which read the stream alone."""
    queries, keys, ffn = 32, 16, 64
    shapes = {
        **{f"self_attn.{n}_proj": (rows, 32) for n, rows in (("q", queries), ("k", keys), ("v", keys))},
        "self_attn.o_proj": (32, queries),
        **{f"mlp.{n}_proj": (ffn, 32) for n in ("gate", "up")},
        "mlp.down_proj": (32, ffn),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    return drawn(
        tensors, {f"layers.{i}.{name}.weight": shape for i in (1, 2) for name, shape in shapes.items()}
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PUBLISHED = {
    "eagle": Published("eagle", {}),
    "eagle without fc.bias": Published("eagle", {}, without("fc.bias")),
    "eagle of Qwen2": Published("eagle", {"rope_theta": 1e6}, with_biases("layers.0")),
    "eagle of Llama 3.1": Published("eagle", {"rope_scaling": LLAMA3}),
    "eagle with an embedding": Published("eagle", {}, with_embedding(32)),
    "eagle3": Published("eagle3", TAPS),
    "eagle3 below model.": Published("eagle3", TAPS, renamed("midlayer.", "layers.0.", "model.")),
    "eagle3 of all tokens": Published("eagle3", {**TAPS, "draft_vocab_size": VOCAB}, without("d2t", "t2d")),
    "eagle3 with heads of its own": Published(
        "eagle3", {**TAPS, "num_attention_heads": 6, "num_key_value_heads": 3, "rope_theta": 500.0}
    ),
    "eagle3 narrower than its target": Published(
        "eagle3", {**TAPS, "hidden_size": 24, "target_hidden_size": 32}, with_embedding(24)
    ),
    "eagle3 normed before the residual": Published("eagle3", {**TAPS, "norm_before_residual": True}),
    "eagle of three layers": Published("eagle", {"num_hidden_layers": 3}, with_two_layers),
    "eagle3 of three layers": Published("eagle3", {**TAPS, "num_hidden_layers": 3}, with_two_layers),
    "eagle3 normed as a whole": Published(
        "eagle3",
        {**TAPS, "norm_before_fc": True},
        lambda tensors: drawn(tensors, {"input_norm.weight": (96,)}),
    ),
    "eagle3.1": Published(
        "eagle3",
        {**TAPS, "fc_norm": True, "norm_output": True, "num_hidden_layers": 3},
        lambda tensors: with_two_layers(with_stream_norms(tensors)),
    ),
    "speculators": Published(
        "eagle3",
        {IDS: [1, 2, 3], "norm_before_residual": True},
        renamed("midlayer.", "layers.0."),
        nests=True,
    ),
    "eagle3 with biases": Published("eagle3", {**TAPS, "attention_bias": True}, with_biases("midlayer")),
}


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return folder


def published(folder: Path, target: Path, how: Published) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = read_network(Checkpoint(target))
    config = eagle_config(own, how.kind, **{**HEADS, **how.fields})  # type: ignore[arg-type]
    tensors = how.change(eagle_tensors(config, own, seed=4))
    write_eagle(folder, nested(config) if how.nests else config, tensors)
    return config, tensors


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as the library speculators writes it."""
    head = {"draft_vocab_size", "target_hidden_size", IDS, "norm_before_residual", "norm_before_fc"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {name: value for name, value in config.items() if name not in head},
        **{name: value for name, value in config.items() if name in head},
    }


@torch.inference_mode()
def drafted(
    runner: Runner, *, fuse_again: bool = False, back: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of the text, run in pieces, then those of the head run on its own drafts.

    Also returns the target's hidden states of every position. `fuse_again` is the mutant that fuses at each
    step; `back` is the attention window.
    """
    head, own = runner.head, runner.sequence()
    assert isinstance(head, EagleHead)
    tree = TokenTree.chain(TEXT[:-1])
    window = build_window([Row(tree, 0, own.table_N, own.state)], runner.conv_width, CPU)
    hidden_TD, aux = runner.network.forward_with_aux(window, runner.arena, head.aux_hidden_layers)
    read_TD = head.combine_hidden_states(hidden_TD, aux)

    drafter = HeadDrafter(head, runner.arena, lambda *_: (), CPU, 512, window=back)

    def read(tokens: list[int], start: int, given_TD: Tensor) -> Tensor:
        row = drafter._row(TokenTree.chain(tokens), start, DraftRequest("", 0, (), own.table_N, None))
        return head.forward(build_window([row], 1, CPU), given_TD, runner.arena)

    pieces = [read(TEXT[a + 1 : b + 1], a, read_TD[a:b]) for a, b in ((0, 9), (9, 10), (10, 23))]
    out_1D, outs = pieces[-1][-1:], [*pieces]
    for depth, token in enumerate(DRAFT):
        out_1D = read(
            [token],
            len(TEXT) - 1 + depth,
            head.combine_hidden_states(out_1D, [out_1D] * 3) if fuse_again else out_1D,
        )
        outs.append(out_1D)
    return head.logits(torch.cat(outs)), aux or [hidden_TD]


def expected(oracle: Oracle, given: list[Tensor], seen: Sequence[int] = ()) -> Tensor:
    """Return the same from the oracle, which runs the whole text again for each draft token."""
    tokens, hidden_TD = TEXT[1:], oracle.fuse(given)
    out_TD = oracle.run(tokens, hidden_TD, seen[: len(tokens)])
    for depth in range(len(DRAFT)):
        hidden_TD = torch.cat([hidden_TD, out_TD[-1:]])
        out_TD = oracle.run([*tokens, *DRAFT[: depth + 1]], hidden_TD, seen[: len(hidden_TD)])
    return oracle.logits(out_TD)


def apart(found: Tensor, right: Tensor) -> float:
    """Return the relative norm of the difference of logits, or infinity if different tokens are ranked."""
    if not torch.equal(found.isinf(), right.isinf()):
        return float("inf")
    gap, whole = (x.masked_fill(right.isinf(), 0.0) for x in (found - right, right))
    return float(gap.nan_to_num().norm() / whole.norm())


@pytest.mark.parametrize("how", PUBLISHED)
def test_each_layout_equals_plain_torch(tmp_path: Path, target: Path, how: str) -> None:
    config, tensors = published(tmp_path, target, PUBLISHED[how])
    runner = Runner(target, torch.float64, eagle=tmp_path)
    embed_VD, head = runner.network.embed_VD, runner.network.head
    found, given = drafted(runner)
    right = expected(Oracle(config, tensors, embed_VD, head.packed.weight_ND), given)
    assert apart(found, right) < FLOAT64_LOGITS
    assert apart(found[:-1], right[1:]) > 1e-2


def test_a_window_leaves_out_whole_blocks_before_it(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At position 10, 5 tokens back lie in the first block; from 23 on, in the second.

    The mutant counts positions from the first block that is read.
    """
    config, tensors = published(tmp_path, target, PUBLISHED["eagle3"])
    runner = Runner(target, torch.float64, eagle=tmp_path)
    oracle = Oracle(config, tensors, runner.network.embed_VD, runner.network.head.packed.weight_ND)
    found, given = drafted(runner, back=5)
    seen = [0] * (len(TEXT) - 1) + [16] * len(DRAFT)
    right = expected(oracle, given, seen)
    assert apart(found, right) < FLOAT64_LOGITS
    assert apart(expected(oracle, given), right) > FLOAT64_LOGITS
    inner = HeadDrafter._row
    monkeypatch.setattr(HeadDrafter, "_row", lambda *own: replace(inner(*own), skipped=0))
    assert apart(drafted(runner, back=5)[0], right) > FLOAT64_LOGITS


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "nemotron_h"])
@torch.inference_mode()
def test_the_streams_are_those_that_transformers_hands_out(tmp_path: Path, family: str) -> None:
    """hidden_states[i] of transformers, as numbered in published configs, is the input of layer i."""
    sample = next(s for s in (draw(family, seed) for seed in range(60)) if s.config.num_hidden_layers > 2)
    reference = save(sample, tmp_path)
    runner = Runner(tmp_path, torch.float32)
    layers, vocab = len(runner.spec.layers), sample.config.vocab_size
    own, tokens = runner.sequence(), [token % vocab for token in TEXT]
    window = build_window([Row(TokenTree.chain(tokens), 0, own.table_N, own.state)], runner.conv_width, CPU)
    hidden_TD, aux = runner.network.forward_with_aux(window, runner.arena, range(layers + 1))
    states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert len(states) == layers + 1
    for layer, (found, right) in enumerate(zip(aux[:-1], states[:-1], strict=True)):
        assert float((found - right[0]).norm() / right.norm()) < LOGITS_RELATIVE, layer
    norm = runner.network.kernels.rms_norm
    assert torch.equal(norm(aux[-1], runner.network.norm_D, runner.spec.norm.eps), hidden_TD)
    assert float((aux[1] - states[2][0]).norm() / states[2].norm()) > LOGITS_RELATIVE


def test_mutants_of_the_published_layout_are_seen(tmp_path: Path, target: Path) -> None:
    """Other layers' streams, a second fusion, draft ids taken for tokens: each silently drafts worse."""
    config, tensors = published(tmp_path, target, PUBLISHED["eagle3"])
    runner = Runner(target, torch.float64, eagle=tmp_path)
    found, given = drafted(runner)
    right = expected(
        Oracle(config, tensors, runner.network.embed_VD, runner.network.head.packed.weight_ND), given
    )
    assert apart(found, right) < FLOAT64_LOGITS
    head = runner.head
    assert isinstance(head, EagleHead)
    assert apart(drafted(runner, fuse_again=True)[0], right) > FLOAT64_LOGITS
    head.aux_hidden_layers = (1, 2, 3)
    assert apart(drafted(runner)[0], right) > FLOAT64_LOGITS
    head.aux_hidden_layers = (0, 2, 1)
    assert apart(drafted(runner)[0], right) > FLOAT64_LOGITS
    head.aux_hidden_layers = (0, 1, 2)
    head.project.ids_C = torch.arange(config["draft_vocab_size"])  # type: ignore[union-attr]
    assert apart(drafted(runner)[0], right) > FLOAT64_LOGITS


@pytest.mark.parametrize(
    ("layers", "given", "aux_hidden_layers"),
    [
        (32, {IDS: None}, (2, 16, 29)),
        (32, {IDS: [2, 16, 29]}, (2, 16, 29)),
        (32, {IDS: [1, 15, 28]}, (2, 16, 29)),
        (32, {IDS: None, "eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29)),
        (36, {IDS: None, "eagle_config": {IDS: [24, 30, 36]}}, (24, 30, 36)),
        (5, {IDS: None}, (2, 2, 2)),
    ],
)
def test_layers_are_counted_in_both_published_ways(
    tmp_path: Path, target: Path, layers: int, given: dict[str, Any], aux_hidden_layers: tuple[int, ...]
) -> None:
    published(tmp_path, target, Published("eagle3", given))
    network = read_network(Checkpoint(target))
    deep = replace(network, layers=network.layers[:1] * layers)
    assert read_head(tmp_path, deep).spec.aux_hidden_layers == aux_hidden_layers


REFUSED: Mapping[str, tuple[Published, str, str]] = {
    "no layer": (
        Published("eagle3", TAPS, renamed("midlayer.", "blocks.0.")),
        "draft_model",
        "'LlamaForCausalLMEagle3'",
    ),
    "no fc": (Published("eagle", {}, without("fc.weight")), "draft_model", "expected is fc.weight with"),
    "another head of speculators": (
        Published("eagle3", {**TAPS, "speculators_model_type": "peagle"}),
        "speculators_model_type",
        "specdec needs 'eagle3' or 'dflash' or 'dspark'",
    ),
    "norms of EAGLE-3 in EAGLE-1": (Published("eagle", {"fc_norm": True}), "fc_norm", "EAGLE-3"),
    "another activation": (
        Published("eagle3", {**TAPS, "hidden_act": "gelu"}, nests=True),
        "transformer_layer_config.hidden_act",
        "specdec needs 'silu'",
    ),
    "another width": (Published("eagle", {"hidden_size": 24}), "hidden_size", "the target's width (32)"),
    "another target": (
        Published("eagle3", {**TAPS, "target_hidden_size": 64}),
        "target_hidden_size",
        "specdec needs 32",
    ),
    "no such layer": (
        Published("eagle3", {IDS: [2, 3, 7]}),
        IDS,
        "layers of a target that has 3",
    ),
    "no map": (Published("eagle3", TAPS, without("d2t")), "draft_vocab_size", "as there is no tensor d2t"),
    "a map of another vocabulary": (
        Published("eagle3", TAPS, lambda t: t | {"d2t": t["d2t"] + VOCAB}),
        "d2t",
        f"beyond the target's {VOCAB}",
    ),
    "a short map": (Published("eagle3", TAPS, lambda t: t | {"d2t": t["d2t"][1:]}), "d2t", "no list of 32"),
    "scaled positions": (
        Published("eagle", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}),
        "rope_scaling.rope_type",
        "'llama3'",
    ),
    "drafts in parallel": (
        Published("eagle3", {**TAPS, "parallel_drafting": True}),
        "parallel_drafting",
        "EAGLE-1 to 3.1",
    ),
    "no streams": (
        Published("eagle3", {**TAPS, "eagle_config": {"use_aux_hidden_state": False}}),
        "eagle_config.use_aux_hidden_state",
        "specdec needs True",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, target: Path, what: str) -> None:
    how, field, words = REFUSED[what]
    published(tmp_path, target, how)
    with pytest.raises(CheckpointError) as caught:
        read_head(tmp_path, read_network(Checkpoint(target)))
    assert caught.value.field == field
    assert words in str(caught.value) and str(caught.value).startswith("draft_model: ")
    assert "\n" not in str(caught.value)


def test_a_mask_of_other_tokens_is_told_of_and_not_read(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks for training are published in several forms; only a non-empty one can contradict."""
    for mask, is_odd in ((lambda x: x.roll(1), True), (lambda x: x, False), (lambda x: x & False, False)):
        made = tmp_path / str(len(list(tmp_path.iterdir())))
        made.mkdir()
        published(made, target, Published("eagle3", TAPS, lambda t, m=mask: t | {"t2d": m(t["t2d"])}))
        caplog.clear()
        read_head(made, read_network(Checkpoint(target)))
        assert ("t2d disagrees with d2t" in caplog.text) == is_odd


def test_a_head_of_another_verifier_is_warned_about(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library speculators stores the architectures that a head was trained for."""
    published(tmp_path, target, PUBLISHED["speculators"])
    network = read_network(Checkpoint(target))
    for architectures in ([], ["Qwen3ForCausalLM"]):
        read_head(tmp_path, network, architectures)
    assert not caplog.text
    read_head(tmp_path, network, ["LlamaForCausalLM"])
    assert "trained for Qwen3ForCausalLM, and this model is LlamaForCausalLM" in caplog.text


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, target: Path) -> None:
    spoilt = Published(
        "eagle3", TAPS, lambda t: without("norm.weight")(t) | {"midlayer.extra.weight": torch.ones(2)}
    )
    published(tmp_path, target, spoilt)
    with pytest.raises(CheckpointError, match=r"norm\.weight \[32\](.|\n)*midlayer\.extra\.weight"):
        Runner(target, torch.float32, eagle=tmp_path)


def test_a_folder_of_pickles_is_refused_with_what_to_do(tmp_path: Path, target: Path) -> None:
    published(tmp_path, target, PUBLISHED["eagle"])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"draft_model: .*convert them to safetensors"):
        read_head(tmp_path, read_network(Checkpoint(target)))
    with pytest.raises(CheckpointError, match=r"draft_model: .* is not a folder") as caught:
        read_head(tmp_path / "absent", read_network(Checkpoint(target)))
    assert caught.value.field == "draft_model"


def test_a_head_is_found_where_it_is_said_to_lie(tmp_path: Path) -> None:
    assert find_head(tmp_path, "eagle", None) is None
    for name in ("eagle", "eagle3"):
        (tmp_path / name).mkdir()
        assert find_head(tmp_path, "eagle", None) == tmp_path / name
    assert find_head(tmp_path, "auto", None) is None and find_head(tmp_path, "mtp", None) is None
    assert find_head(tmp_path, "auto", "elsewhere") == Path("elsewhere")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_random_head_fits_its_target(
    tmp_path: Path, target: Path, kind: Literal["eagle", "eagle3"]
) -> None:
    write_random_eagle(tmp_path, read_network(Checkpoint(target)), seed=0, kind=kind)
    logits_TV, _ = drafted(Runner(target, torch.float32, eagle=tmp_path))
    assert int(logits_TV.isfinite()[0].sum()) == (VOCAB if kind == "eagle" else VOCAB // 2)
