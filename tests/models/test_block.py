"""Block heads draft what a plain float64 reference drafts, in every published layout, and refuse the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.draft.block import BlockDrafter
from specdec.draft.drafter import DraftRequest
from specdec.draft.levels import DraftPosition
from specdec.draft.proposal import DraftShape, Proposal
from specdec.errors import CheckpointError
from specdec.models.block_head import BlockHead
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import read_network
from specdec.models.heads import kind_of, read_head
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window
from tests.models.block_heads import MASK, BlockOracle, block_config, block_tensors, streams_of, write_block
from tests.models.runner import CPU, Runner
from tests.tolerances import FLOAT64_LOGITS

LAYERS = 3
"""Layers of the target."""
TEXT = [5, 17, 40, 3, 3, 28, 60, 9, 12, 33, 7, 50, 2, 2, 19, 44, 8, 30, 21, 6, 11, 11, 57, 4]
PIECES = (1, 8, 1, 3, 4, 2)
"""Tokens accepted between proposals: fewer and more than a block."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """A published kind of head: fields of the config, and the change to the drawn tensors."""

    fields: Mapping[str, Any]
    change: Callable[[Tensors], Tensors] = dict
    nests: bool = False
    """Whether the layers' fields are nested, as speculators writes them."""


def below(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: value for name, value in tensors.items()}


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(ends)}


def nested(**fields: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 0], **fields}}


SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "aux_hidden_state_layer_ids": [0, 2, 1],
    "mask_token_id": MASK,
    "dflash_config": None,
    "draft_vocab_size": 33,
}
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "dflash_config": None,
    "target_layer_ids": [1, 0],
    "mask_token_id": MASK,
    "markov_rank": 7,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
PUBLISHED = {
    "z-lab": Published({}),
    "block size nested": Published({**nested(block_size=7), "block_size": None}),
    "below model.": Published({}, below("model.")),
    "one layer, default streams": Published(
        {"num_hidden_layers": 1, "dflash_config": {"mask_token_id": MASK}}
    ),
    "biases": Published({"attention_bias": True}),
    "JetSpec": Published(nested(causal=True)),
    "causal at the top": Published({"is_causal": True}),
    "sliding layers": Published({**SLIDING, "use_sliding_window": True}),
    "sliding layers by use_swa": Published(nested(causal=True, use_swa=True, swa_window_size=6)),
    "speculators": Published(SPECULATORS, nests=True),
    "speculators, narrower": Published(
        {**SPECULATORS, "hidden_size": 24, "target_hidden_size": 32}, nests=True
    ),
    "speculators of Llama's kind": Published(
        SPECULATORS, without("q_norm.weight", "k_norm.weight"), nests=True
    ),
    "DeepSpec": Published(DEEPSPEC),
    "DSpark of speculators": Published(
        {**SPECULATORS, "speculators_model_type": "dspark", "markov_rank": 7}, nests=True
    ),
    "DSpark without the anchor": Published({**DEEPSPEC, "sample_from_anchor": False}),
    "from the anchor": Published({**SPECULATORS, "sample_from_anchor": True, "block_size": 4}, nests=True),
}
HEAD_FIELDS = (
    *SPECULATORS,
    *("block_size", "target_hidden_size", "sample_from_anchor", "sliding_window_non_causal", "markov_rank"),
)


def published(folder: Path, how: Published) -> tuple[dict[str, Any], Tensors]:
    """Write a head; return its flat config, completed for the reference, and its tensors."""
    config = {k: v for k, v in block_config(LAYERS, **how.fields).items() if v is not None}
    written = config
    if how.nests:
        layer = {name: value for name, value in config.items() if name not in HEAD_FIELDS}
        written = {name: value for name, value in config.items() if name in HEAD_FIELDS}
        written["transformer_layer_config"] = layer
    own = dict(config)
    own.setdefault("sample_from_anchor", "markov_rank" in own)
    if "dflash_config" in own:
        given = own["dflash_config"]
        own["dflash_config"] = {"target_layer_ids": [1], **given}
        if given.get("use_swa"):
            own |= {"layer_types": ["sliding_attention"] * 3, "sliding_window": given["swa_window_size"]}
    tensors = block_tensors(own, seed=4)
    changed = how.change(tensors)
    write_block(folder, written, changed)
    kept = {name.removeprefix("model.") for name in changed}
    return own, {name: value for name, value in tensors.items() if name in kept}


class Bench:
    """A target with a block head, and a drafter that ranks by probability and keeps all logits."""

    def __init__(self, folder: Path, target: Path, how: Published, *, window: int | None = None) -> None:
        config, tensors = published(folder, how)
        self.runner = Runner(target, torch.float64, eagle=folder)
        assert isinstance(self.runner.head, BlockHead)
        self.head, network = self.runner.head, self.runner.network
        self.oracle = BlockOracle(config, tensors, network.embed_VD, network.head.packed.weight_ND)
        self.drafter = BlockDrafter(self.head, self.runner.arena, self._rank, CPU, 512, window=window)
        self.ranked: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.streams = streams_of(config)

    def _rank(self, logits_NV: Tensor, places: Sequence[DraftPosition], count: int) -> list[Any]:
        at = ((str(place.want.key), place.path) for place in places)
        self.ranked |= dict(zip(at, logits_NV, strict=True))
        best_NK = logits_NV.softmax(-1).nan_to_num().topk(count)
        return list(zip(best_NK.indices.tolist(), best_NK.values.tolist(), strict=True))

    @property
    def chain(self) -> DraftShape:
        return DraftShape(self.head.deepest, 1, self.head.deepest + 1)


@torch.inference_mode()
def gaps(
    bench: Bench, pieces: Sequence[int] = PIECES, *, shape: DraftShape | None = None, back: int | None = None
) -> list[float]:
    """Accept the text piece by piece; return how far each proposal's logits are from the reference's.

    Checks the proposals that have the reference's logits. `back` is the attention window.
    """
    runner, own, found = bench.runner, bench.runner.sequence(), list[float]()
    whole = runner.sequence()
    window = build_window([Row(TokenTree.chain(TEXT), 0, whole.table_N, whole.state)], runner.conv_width, CPU)
    _, streams = runner.network.forward_with_aux(window, runner.arena, bench.streams)
    start, shape = 0, shape or bench.chain
    for count in pieces:
        runner.step([(own, TEXT[start : start + count])])
        bench.drafter.read("a", own.hidden[-1])
        start += count
        bench.ranked.clear()
        request = DraftRequest("a", 1, TEXT[: start + 1], own.table_N, shape)
        (proposal,) = bench.drafter.propose([request])
        first = 0 if back is None else max(start - back, 0) // 16 * 16
        right_SV = bench.oracle.logits([x_TD[:start] for x_TD in streams], TEXT[start], first=first)[
            : shape.num_steps
        ]
        right = {
            path: right_SV[len(path)] + bench.oracle.bias((TEXT[start], *path)[-1])
            for _, path in bench.ranked
        }
        found.append(apart(torch.stack(list(bench.ranked.values())), torch.stack(list(right.values()))))
        if found[-1] < FLOAT64_LOGITS:
            check(proposal, {path: logits_V.softmax(-1) for path, logits_V in right.items()}, shape)
    return found


def check(proposal: Proposal, shares: Mapping[tuple[int, ...], Tensor], shape: DraftShape) -> None:
    """Check that each node has one of the best tokens after its path, and that token's probability."""
    tree, paths = proposal.tree, [()]
    for token, parent, belief in zip(tree.tokens[1:], tree.parents[1:], proposal.beliefs[1:], strict=True):
        share_V = shares[paths[parent]]
        assert token in share_V.topk(shape.topk).indices and belief == pytest.approx(float(share_V[token]))
        paths.append((*paths[parent], token))
    best: tuple[int, ...] = ()
    while best in shares:
        best = (*best, int(shares[best].argmax()))
    if shape.topk == 1:
        assert tree.is_chain and tree.tokens[1:] == best
    else:
        assert not tree.is_chain and len(tree.follow([*best, -1])) > 1


def apart(found: Tensor, right: Tensor) -> float:
    """Return the relative norm of the difference of logits, or infinity if different tokens are ranked."""
    if not torch.equal(found.isinf(), right.isinf()):
        return float("inf")
    gap, whole = (x.masked_fill(right.isinf(), 0.0) for x in (found - right, right))
    return float(gap.nan_to_num(nan=1e9).norm() / whole.norm())


@pytest.mark.parametrize("how", PUBLISHED)
def test_chains_equal_a_plain_reference(tmp_path: Path, folder: Path, how: str) -> None:
    found = gaps(Bench(tmp_path, folder, PUBLISHED[how]))
    assert max(found) < FLOAT64_LOGITS


@pytest.mark.parametrize("how", ["z-lab", "DeepSpec"])
def test_trees_have_the_best_tokens_after_each_path(tmp_path: Path, folder: Path, how: str) -> None:
    found = gaps(Bench(tmp_path, folder, PUBLISHED[how]), shape=DraftShape(3, 3, 12))
    assert max(found) < FLOAT64_LOGITS


def test_a_window_leaves_out_whole_blocks_before_it(tmp_path: Path, folder: Path) -> None:
    bench = Bench(tmp_path, folder, PUBLISHED["z-lab"], window=5)
    assert max(gaps(bench, (20, 2, 1), back=5)) < FLOAT64_LOGITS
    bench.drafter.forget()
    assert gaps(bench, (20, 2, 1))[-1] > 1e-3


@torch.inference_mode()
def test_sequences_that_draft_together_draft_as_alone(tmp_path: Path, folder: Path) -> None:
    bench = Bench(tmp_path, folder, PUBLISHED["sliding layers"])
    asked = [
        ("a", 5, bench.chain),
        ("b", 12, DraftShape(3, 3, 9)),
        ("c", 2, None),
        ("d", 1, DraftShape(1, 1, 2)),
    ]

    def begin(key: str, length: int, shape: DraftShape | None) -> DraftRequest:
        own = bench.runner.sequence()
        bench.runner.step([(own, TEXT[:length])])
        bench.drafter.read(key, own.hidden[-1])
        return DraftRequest(key, 1, TEXT[: length + 1], own.table_N, shape)

    alone = [bench.drafter.propose([begin(*each)])[0] for each in asked]
    assert [own.num_drafted for own in alone] == [4, 8, 0, 1]
    for order in (asked, asked[::-1]):
        bench.drafter.forget()
        for each, found in zip(order, bench.drafter.propose([begin(*each) for each in order]), strict=True):
            assert found.tree == alone[asked.index(each)].tree


def shifted(head: BlockHead) -> None:
    """Write the context one position late."""
    inner = head._writes

    def wrong(window: Window, *rest: Any) -> Any:
        groups = tuple(replace(group, length_B=group.length_B + 1) for group in window.groups)
        return inner(replace(window, groups=groups, position_T=window.position_T + 1), *rest)

    head._writes = wrong  # type: ignore[assignment]


def rotated(head: BlockHead) -> None:
    """Rotate the context's keys by the next position."""
    inner = head._writes
    head._writes = lambda window, *rest: inner(  # type: ignore[assignment]
        replace(window, position_T=window.position_T + 1), *rest
    )


def keeps_masks(head: BlockHead) -> None:
    """Keep the keys and values of a block where tokens are accepted."""
    writes, passes, ends = head._writes, head._passes, [0]

    def write(window: Window, *rest: Any) -> Any:
        return () if int(window.position_T[0]) < ends[0] else writes(window, *rest)

    def run(window: Window, *rest: Any) -> Any:
        ends[0] = int(window.position_T[-1]) + 1
        return passes(window, *rest)

    head._writes, head._passes = write, run  # type: ignore[assignment]


def without_the_anchor(head: BlockHead) -> None:
    """Begin the block with a mask."""
    inner = head._passes

    def wrong(window: Window, *rest: Any) -> Any:
        return inner(replace(window, token_T=torch.full_like(window.token_T, head.mask)), *rest)

    head._passes = wrong  # type: ignore[assignment]


def one_way(head: BlockHead) -> None:
    """Hide later tokens of the block."""
    head.spec = replace(head.spec, causal=(True,) * len(head.spec.causal))


def swapped(head: BlockHead) -> None:
    """Read the streams in the order of the layers."""
    head.aux_hidden_layers = tuple(sorted(head.aux_hidden_layers))


def off_by_one(head: BlockHead) -> None:
    """Read the streams that enter the named layers, instead of those that leave them."""
    head.aux_hidden_layers = tuple(layer - 1 for layer in head.aux_hidden_layers)


def from_the_anchor(head: BlockHead) -> None:
    """Take the anchor's output for the first draft token."""
    head.spec = replace(head.spec, first=0)


def of_the_next(head: BlockHead) -> None:
    """Return another token's transitions."""
    inner = head.bias
    head.bias = lambda token_N: inner((token_N + 1) % 64)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("how", "mutant"),
    [
        *(
            ("z-lab", mutant)
            for mutant in (shifted, rotated, keeps_masks, without_the_anchor, one_way, swapped, off_by_one)
        ),
        ("z-lab", from_the_anchor),
        ("DeepSpec", of_the_next),
    ],
)
def test_mutants_are_seen(
    tmp_path: Path, folder: Path, how: str, mutant: Callable[[BlockHead], None]
) -> None:
    """Each silently drafts worse."""
    bench = Bench(tmp_path, folder, PUBLISHED[how])
    mutant(bench.head)
    assert max(gaps(bench)) > 1e-3


REFUSED: Mapping[str, tuple[Published, str, str]] = {
    "DFlash2": (Published({"architectures": ["DFlash2DraftModel"]}), "architectures", "DFlashDraftModel"),
    "another DSpark": (Published({**DEEPSPEC, "markov_head_type": "rnn"}), "markov_head_type", "'vanilla'"),
    "DSpark without a rank": (Published({**DEEPSPEC, "markov_rank": None}), "markov_rank", "an integer"),
    "transitions of DFlash": (Published({"markov_rank": 7}), "markov_rank", "a head of DSpark"),
    "DFlash2 of speculators": (
        Published({**SPECULATORS, "speculators_model_type": "dflash2"}, nests=True),
        "speculators_model_type",
        "'eagle3' or 'dflash' or 'dspark'",
    ),
    "a projector": (
        Published(nested(projector_type="domino")),
        "dflash_config.projector_type",
        "DFlash without this option",
    ),
    "attention sinks": (
        Published(nested(attention_sink_bias=True)),
        "dflash_config.attention_sink_bias",
        "without this option",
    ),
    "no block size": (Published({"block_size": None}), "block_size", "an integer of at least 2"),
    "a wide block": (Published({"block_size": 65}), "block_size", "at most 64"),
    "no mask": (Published({"dflash_config": {"target_layer_ids": [0]}}), "mask_token_id", "an integer"),
    "a mask beyond the vocabulary": (
        Published(nested(mask_token_id=64)),
        "dflash_config.mask_token_id",
        "at most 63",
    ),
    "the last layer's output": (
        Published(nested(target_layer_ids=[0, 2])),
        "dflash_config.target_layer_ids",
        "layers before the last of a target that has 3",
    ),
    "another target": (Published({"num_target_layers": 4}), "num_target_layers", "specdec needs 3"),
    "no streams": (
        Published({**SPECULATORS, "aux_hidden_state_layer_ids": []}, nests=True),
        "aux_hidden_state_layer_ids",
        "layers before the last",
    ),
    "another width": (Published({"hidden_size": 24}), "hidden_size", "the target's width (32)"),
    "another activation": (Published({"hidden_act": "gelu"}), "hidden_act", "specdec needs 'silu'"),
    "a window that sees ahead": (
        Published({**SLIDING, **nested(causal=False)}),
        "dflash_config.causal",
        "causal layers (true)",
    ),
    "use_swa that sees ahead": (
        Published(nested(use_swa=True, swa_window_size=6)),
        "dflash_config.use_swa",
        "causal layers",
    ),
    "a window without layer types": (
        Published({"use_sliding_window": True, "sliding_window": 6}),
        "use_sliding_window",
        "the same as layer_types",
    ),
    "a window of speculators that sees ahead": (
        Published({**SPECULATORS, **SLIDING, "sliding_window_non_causal": True}, nests=True),
        "sliding_window_non_causal",
        "without this option",
    ),
    "interleaved rotation": (Published({"is_neox_style": False}), "is_neox_style", "specdec needs True"),
    "no rotary base": (Published({"rope_theta": None}), "rope_theta", "libraries assume different ones"),
    "scaled positions": (
        Published({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}),
        "rope_scaling.rope_type",
        "'llama3'",
    ),
    "no map": (Published(SPECULATORS, without("d2t"), nests=True), "draft_vocab_size", "no tensor d2t"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, folder: Path, what: str) -> None:
    how, field, words = REFUSED[what]
    published(tmp_path, how)
    assert kind_of(tmp_path) == "block"
    with pytest.raises(CheckpointError) as caught:
        read_head(tmp_path, read_network(Checkpoint(folder)))
    assert caught.value.field == field
    assert words in str(caught.value) and str(caught.value).startswith("draft_model: ")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, folder: Path) -> None:
    spoilt = Published(
        {}, lambda t: without("hidden_norm.weight")(t) | {"layers.0.extra.weight": torch.ones(2)}
    )
    published(tmp_path, spoilt)
    with pytest.raises(CheckpointError, match=r"hidden_norm\.weight \[32\](.|\n)*layers\.0\.extra\.weight"):
        Runner(folder, torch.float32, eagle=tmp_path)


@pytest.mark.parametrize(
    ("layers", "own", "streams"), [(36, 5, (2, 10, 18, 26, 34)), (32, 1, (17,)), (64, 3, (2, 32, 62))]
)
def test_streams_are_spread_by_default(
    tmp_path: Path, folder: Path, layers: int, own: int, streams: tuple[int, ...]
) -> None:
    """As z-lab's heads are built: from the output of layer 1 to that of the third last."""
    published(
        tmp_path,
        Published(
            {"num_hidden_layers": own, "dflash_config": {"mask_token_id": 1}, "num_target_layers": layers}
        ),
    )
    network = read_network(Checkpoint(folder))
    deep = replace(network, layers=network.layers[:1] * layers)
    assert read_head(tmp_path, deep).spec.aux_hidden_layers == streams
