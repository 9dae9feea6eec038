"""Pages as in an arena: a layer's KV between those of other layers, heads outermost."""

import torch
from torch import Tensor

LAYERS, OWN = 3, 1


def make_blocks(
    blocks: int, parts: int, tokens: int, heads: int, dim: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Make blocks [N, J, layer, parts, tokens, D] filled with NaN."""
    return torch.full((blocks, heads, LAYERS, parts, tokens, dim), torch.nan, dtype=dtype)


def layer_of(blocks_NJLPXD: Tensor) -> Tensor:
    """Return a view of one layer's pages: [N, parts, tokens, J, D]."""
    return blocks_NJLPXD[:, :, OWN].permute(0, 2, 3, 1, 4)
