"""An attention layer on a GPU: FlashInfer for the windows that it supports, Triton for others."""

import logging
from functools import cache

import torch
from torch import Tensor

from specdec.kernels.attention.flashinfer import Scratch, attend, supports
from specdec.kernels.group import Group
from specdec.kernels.self_attention import triton
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation

logger = logging.getLogger(__name__)


class FlashInferAttention:
    """FlashInfer attention of one engine; engines may run concurrently, so each has its own workspace."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        """Allocated at the first window, before any graph is captured."""

    def self_attention(
        self,
        projected_TN: Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None,
        pages: Tensor,
        group: Group,
    ) -> Tensor:
        """Run everything between the projections; mutates `pages` as the append does."""
        taken = supports(group, layer, pages)
        _log_choice(
            group.width, pages.dtype, layer.heads, layer.kv_heads, layer.head_dim, layer.window, taken
        )
        if not taken:
            return triton.self_attention(projected_TN, layer, rotation, pages, group)
        self._scratch = self._scratch or Scratch.on(pages.device)
        q_THD = triton.ready(projected_TN, layer, rotation, pages, group)
        o_THD = attend(q_THD, pages, group, layer.scale, self._scratch)
        gate_THD = triton.gate_of(projected_TN, layer)
        if gate_THD is not None:
            o_THD *= torch.sigmoid(gate_THD)
        return o_THD.view(len(projected_TN), -1)


@cache
def _log_choice(
    width: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, sliding: int | None, taken: bool
) -> None:
    """Log the attention kernel once per kind of window."""
    name = "FlashInfer's XQA" if taken else "Triton"
    past = f", sliding over {sliding} tokens" if sliding else ""
    logger.info(
        *("attention of %d over %d heads of %d, %s%s, window %d: %s", heads, kv_heads, dim, dtype, past),
        *(width, name),
    )
