"""A draft vocabulary: fewer rows of the output head to read.

It comes from the head itself (EAGLE-3's d2t), from token counts in some text, or from token ids.
"""

import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.table import Kernels
from specdec.models.files import COUNTS
from specdec.models.linear import Linear

log = logging.getLogger(__name__)


def commonest(folder: Path, count: int, vocab: int) -> Tensor:
    """Return the most common tokens by a folder's counts, in order; ties go to the smaller id.

    Without counts these are the first ids: BPE tokenizers number tokens in merge order, which starts with the
    most common pair.
    """
    path = folder / COUNTS
    if not path.is_file():
        log.info("draft_vocab: %s has no %s; the first %d tokens are drafted", folder, COUNTS, count)
        return torch.arange(min(count, vocab))
    try:
        counts = json.loads(path.read_text("utf-8"))["counts"]
        is_valid = len(counts) <= vocab and all(type(entry) is int and entry >= 0 for entry in counts)
    except (ValueError, KeyError, TypeError, OSError):
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f'draft_vocab: {path} must hold {{"counts": [of token 0, of token 1, …]}}, integers from 0, '
            f"of the model's {vocab} tokens at most; write it anew, or leave draft_vocab out.",
            field="draft_vocab",
        )
    counts_V = torch.zeros(vocab, dtype=torch.int64)
    counts_V[: len(counts)] = torch.tensor(counts, dtype=torch.int64)
    return counts_V.sort(descending=True, stable=True).indices[:count].sort().values


class Shortlist:
    """Projects to logits of `ids_C`, arranged by the target's ids; None: all tokens, in order.

    So sampling uses the target's token ids and their noise.
    """

    def __init__(self, head_CD: Matrix, ids_C: Tensor | None, vocab: int, kernels: Kernels) -> None:
        self.head, self.ids_C, self.vocab, self.kernels = Linear(kernels, head_CD), ids_C, vocab, kernels

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, minus infinity for unranked tokens."""
        logits_TC = self.head(hidden_TD)
        if self.ids_C is None:
            return logits_TC
        logits_TV: Tensor = self.kernels.scatter_columns(logits_TC, self.ids_C, self.vocab)
        return logits_TV
