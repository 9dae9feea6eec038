"""The bytes that a step must move, by kernel class, and its roofline at a bandwidth."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.bench.random_model import shape_config
from specdec.bench.report import ReportOutput, publish, table
from specdec.errors import ConfigError
from specdec.models import families, spec
from specdec.models.formats import FORMATS, WeightFormat
from specdec.models.mixers import Mixer
from specdec.models.network import memory_layout
from specdec.setup.footprint import Footprint, Parameter, measure
from specdec.state_slots.layout import Layout
from tools.bench.options import ModelOptions

DRAFTING, HEAD = "draft steps", "output matrix"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step: `rows` requests, each with a window of `window` tokens after `context` cached ones."""

    rows: int = 1
    window: int = 1
    context: int = 0
    accepted: float = 1.0
    """Tokens gained per row and step, including the bonus token."""
    draft_steps: int = 0
    topk: int = 1
    slots: str = "record"

    @property
    def tokens(self) -> int:
        return self.rows * self.window


class TimeModel:
    """Count the bytes of a network's steps."""

    def __init__(
        self,
        network: spec.NetworkSpec,
        dtype: torch.dtype = torch.bfloat16,
        *,
        quantize: WeightFormat | None = None,
        copied: bool = False,
    ) -> None:
        """Count large matrices, also the head's, in format `quantize`; `copied`: a rounded copy drafts."""
        self.network = network
        self.footprint: Footprint = measure(network, dtype, quantize=quantize, copied=copied)
        self.layout: Layout = memory_layout(network, dtype, head=network.mtp)

    def step(self, work: StepWork) -> dict[str, float]:
        """Return the bytes of one step by kernel class, the largest first.

        A weight is read once however many tokens share it, an expert's weights only if a token chose it: of E
        experts, T tokens that choose k each at random touch E(1 − (1 − k/E)^T).
        """
        found: dict[str, float] = {}
        for parameter in self.footprint.target:
            kind = self._kind(parameter.name)
            if kind is not None:
                found[kind] = found.get(kind, 0.0) + read_bytes(parameter, work.tokens)
        if self.layout.states:
            found["states"] = work.rows * state_bytes(self.layout, work.window, work.slots)
        if (layers := _attentions(self.network.layers)) and self.layout.kv:
            found["keys and values"] = self._kv_bytes(layers, work.rows, work.context, work.window)
        if work.draft_steps:
            found[DRAFTING] = self._draft_bytes(work)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def weight_bytes(self, *, mtp: bool) -> int:
        """Return the bytes of the weights in memory."""
        head = self.footprint.mtp if mtp else ()
        return sum(p.bytes for p in (*self.footprint.target, *self.footprint.copy, *head))

    def _draft_bytes(self, work: StepWork) -> float:
        """Count the passes of the MTP head: over the accepted tokens, then over topk tokens per level.

        A copy that drafts starts by copying each state, and then decodes.
        """
        if self.footprint.copy:
            return self._copy_bytes(work)
        if not self.network.mtp:
            raise ConfigError(
                "draft_steps: this shape has no multi-token head that could draft", field="draft_steps"
            )
        read = [p for p in self.footprint.target if self._kind(p.name) == HEAD]
        layers = _attentions(self.network.mtp)
        passes = [work.accepted, *[float(work.topk)] * (work.draft_steps - 1)]
        total = 0.0
        for tokens in passes:
            total += sum(read_bytes(p, work.rows * tokens) for p in (*self.footprint.mtp, *read))
            total += self._kv_bytes(layers, work.rows, work.context, tokens)
        return total

    def _copy_bytes(self, work: StepWork) -> float:
        layers = _attentions(self.network.layers)
        step = sum(read_bytes(p, work.rows) for p in self.footprint.copy)
        if layers and self.layout.kv:
            step += self._kv_bytes(layers, work.rows, work.context, 1)
        states = 2 * work.rows * self.layout.state_bytes if self.layout.states else 0
        return states + work.draft_steps * (step + states)

    def _kv_bytes(self, layers: Sequence[Mixer], rows: int, context: int, window: float) -> float:
        """Count keys and values: those in reach are read once per row, the window's are written and read."""
        per_layer = self.layout.block_bytes / self.layout.block_tokens / len(self.layout.kv)
        reaches = (mixer.reach() for mixer in layers)
        seen = sum(context if reach is None else min(context, reach - 1) for reach in reaches)
        return per_layer * rows * (seen + 2 * window * len(layers))

    def _kind(self, name: str) -> str | None:
        """Return the kernel class that reads a parameter; None for an embedding, read only by row."""
        if name == self.footprint.table:
            return None
        if name in ("head.weight", "embed.weight"):
            return HEAD
        if ".experts." in name:
            return "experts"
        if ".router." in name:
            return "routers"
        if ".ffn." in name:
            return "dense feed-forward"
        if found := re.match(r"layers\.(\d+)\.mixer(\d?)\.", name):
            mixer = self.network.layers[int(found[1])].mixers[int(found[2] or 1) - 1]
            return "recurrent projections" if mixer.state_shape() else "attention projections"
        return "norms"


def read_bytes(parameter: Parameter, tokens: float) -> float:
    """Return the expected bytes read of a parameter by this many tokens: all, or the chosen experts'."""
    if parameter.experts is None:
        return parameter.expected_bytes(1)
    chosen, total = parameter.experts
    return parameter.bytes * float(1 - (1 - chosen / total) ** tokens)


def state_bytes(layout: Layout, window: int, slots: str) -> int:
    """Return the bytes that a row's recurrent layers move for a window.

    Records: the state is read and written once, the accepted path's records are read (at most as many as a
    window has) and the window's are written: 2s + 2mr. Snapshots: the state is read once and written after
    each token: (m + 1)s.
    """
    if slots == "snapshot":
        return (window + 1) * layout.state_bytes
    return 2 * layout.state_bytes + 2 * window * layout.record_bytes


def describe(
    network: spec.NetworkSpec, work: StepWork, bandwidth: float, *, quantize: str | None = None
) -> dict[str, Any]:
    """Return the minimum time of a step in seconds, and the maximum tokens per second."""
    model = TimeModel(network, quantize=FORMATS[quantize] if quantize else None)
    found = model.step(work)
    total = sum(found.values())
    return {
        "benchmark": "model",
        "batch": work.rows,
        "window": work.window,
        "context": work.context,
        "acceptance": work.accepted,
        "draft_steps": work.draft_steps,
        "draft_topk": work.topk,
        "quantize": quantize,
        "slots": work.slots,
        "bytes": found,
        "target_bytes": total - found.get(DRAFTING, 0.0),
        "total_bytes": total,
        "weight_bytes": model.weight_bytes(mtp=bool(work.draft_steps)),
        "bytes_per_s": bandwidth,
        "floor_s": total / bandwidth,
        "ceiling_tokens_per_s": work.rows * work.accepted * bandwidth / total,
    }


def run(options: ModelOptions, bandwidth: float, out: ReportOutput) -> None:
    """Compute the bytes of a step of a named shape and publish the report."""
    shape = families.network(shape_config(options.shape))
    default_steps = options.window - 1 if shape.mtp else 0
    work = StepWork(
        rows=options.batch,
        window=options.window,
        context=options.context,
        accepted=options.acceptance,
        draft_steps=default_steps if options.draft_steps is None else options.draft_steps,
        topk=options.draft_topk,
        slots=options.slots,
    )
    report = {"shape": options.shape, **describe(shape, work, bandwidth, quantize=options.quantize)}
    publish(render(report), report, out)


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    steps = report["draft_steps"]
    drafts = f"{steps} draft steps with topk {report['draft_topk']}" if steps else "nothing drafted"
    rows = [
        {
            "part": kind,
            "GB": f"{size / 1e9:.3f}",
            "ms": f"{size / report['bytes_per_s'] * 1e3:.3f}",
            "share": f"{size / report['total_bytes']:.1%}",
        }
        for kind, size in report["bytes"].items()
    ]
    return "\n".join(
        [
            f"{report['shape']}: batch {report['batch']}, a window of {report['window']} tokens behind "
            f"{report['context']} others, {drafts}, acceptance length {report['acceptance']:g}, "
            f"{report['slots']} slots{f', matrices in {form}' if (form := report['quantize']) else ''}",
            "",
            table(rows),
            "",
            f"weights {report['weight_bytes'] / 1e9:.1f} GB; a step moves "
            f"{report['target_bytes'] / 1e9:.2f} GB for the target, "
            f"{report['total_bytes'] / 1e9:.2f} GB in all",
            f"at {report['bytes_per_s'] / 1e9:,.0f} GB/s: at least {report['floor_s'] * 1e3:.3f} ms a step, "
            f"at most {report['ceiling_tokens_per_s']:,.0f} tokens/s",
        ]
    )


def _attentions(layers: tuple[spec.LayerSpec, ...]) -> list[Mixer]:
    return [mixer for layer in layers for mixer in layer.mixers if mixer.kv_shape() is not None]
