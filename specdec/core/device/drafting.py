"""Draft on the device: run the head on accepted tokens, then grow every row's tree level by level.

The trees equal those of the host's drafter and grower; no tensor is read back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey, width_of
from specdec.core.device.pack import Packer, repeat_rows
from specdec.core.device.rows import BatchRows
from specdec.draft.block import DraftBlock
from specdec.draft.head import DraftHead
from specdec.draft.proposal import DraftShape
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.table import Kernels
from specdec.models.network import LOGITS
from specdec.state_slots.arena import Arena

Table = Sequence[Sequence[Sequence[float]]]
Guess = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Maps the tokens of a level's nodes and the depth of their children to the best children."""


class ProcessedNodes(NamedTuple):
    """Nodes processed by the head: tokens, indices of their parents among them, and input hidden states."""

    token_BA: Tensor
    parent_BA: Tensor
    hidden_BAD: Tensor

    def then(self, level: "ProcessedNodes") -> "ProcessedNodes":
        """Return them with a level appended."""
        return ProcessedNodes(*(torch.cat(pair, dim=1) for pair in zip(self, level, strict=True)))


class DeviceDrafter:
    """Draft with a head on the device. Owns the calibration table; all other state is in the rows."""

    def __init__(
        self,
        head: DraftHead,
        kernels: Kernels,
        arena: Arena,
        pack: Packer,
        table: Table,
        *,
        window: int | None,
        noise: bool = True,
    ) -> None:
        """Limit the head's attention to the last `window` tokens; None: no limit."""
        self.head, self.kernels, self.arena, self.pack = head, kernels, arena, pack
        self.window, self.noise = window, noise
        self.table_3DR = torch.tensor(table, dtype=torch.float64, device=arena.data.device)

    def calibrate(self, table: Table) -> None:
        """Update the calibration table."""
        self.table_3DR.copy_(torch.tensor(table, dtype=torch.float64))

    @torch.inference_mode()
    def draft(self, rows: BatchRows, key: GraphKey, start_B: Tensor, count_B: Tensor, depth: int) -> None:
        """Catch up the head from position `start_B`, and draft the next windows.

        `count_B` is the number of pending hidden states, at most `most`. Where it is 0, as in a row with NaN,
        the draft is meaningless but harmless.
        """
        hidden_BAD, token_BA = rows.hidden_BPD[:, :depth], rows.follows_BP[:, :depth]
        out_BAD = self._read(rows, token_BA, None, start_B, hidden_BAD)
        last_B1D = (count_B - 1).clamp(min=0)[:, None, None].expand(-1, -1, hidden_BAD.shape[-1])
        last_BD = hidden_BAD.gather(1, last_B1D)[:, 0]
        rows.last_BD.copy_(torch.where(count_B[:, None] > 0, last_BD, rows.last_BD))
        if key.shape is not None:
            after_BFD, b = out_BAD.gather(1, last_B1D), len(count_B)
            some = self._rows_at_once(key.shape, b)
            for start in range(0, b, some):
                part = rows if some == b else rows.part(start, start + some)
                self._grow(part, key.shape, after_BFD[start : start + some])
        rows.blank(width_of(key.shape) if key.shape else 1)

    def _rows_at_once(self, shape: DraftShape, rows: int) -> int:
        """Return how many rows are drafted together: a head with a bias holds the logits of whole blocks."""
        has_bias = self.head.block is not None and cast(DraftBlock, self.head).has_bias
        return min(rows, max(1, LOGITS // max(shape.num_steps, shape.topk))) if has_bias else rows

    def _grow(self, rows: BatchRows, shape: DraftShape, after_BFD: Tensor) -> None:
        """Grow drafts from the head's output at the roots, and write the best nodes to the windows.

        A head that drafts a block in one pass starts from it; all nodes of a level have the same children.
        """
        ops, root_B1, m = self.kernels, rows.token_BM[:, :1], width_of(shape)
        up_B1, one_B1 = torch.full_like(root_B1, -1), torch.ones_like(root_B1, dtype=torch.float64)
        tokens, parents, scores, beliefs = [root_B1], [up_B1], [one_B1], [one_B1]
        node_BF, score_BF = torch.zeros_like(root_B1), one_B1
        read = ProcessedNodes(root_B1, up_B1, rows.last_BD[:, None])
        guess = None if self.head.block is None else self._guess_block(rows, shape)
        front_BF, grown = root_B1, 1
        for depth in range(1, shape.num_steps + 1):
            if guess is None:
                token_BFK, share_BFK = self._guess(after_BFD, rows, shape.topk, depth)
            else:
                token_BFK, share_BFK = guess(front_BF, depth)
            chance_BFK = ops.children(share_BFK, score_BF, depth, self.table_3DR)
            _, f, k = token_BFK.shape
            tokens.append(token_BFK.flatten(1))
            parents.append(node_BF.repeat_interleave(k, dim=1))
            scores.append(chance_BFK.flatten(1))
            beliefs.append(share_BFK.double().clamp(max=1.0).flatten(1))
            if depth == shape.num_steps:
                break
            best_BF = ops.frontier(scores[-1], min(shape.topk, f * k))
            above_BF, grown = best_BF // k, grown + f * k
            node_BF, score_BF = grown - f * k + best_BF, scores[-1].gather(1, best_BF)
            front_BF = tokens[-1].gather(1, best_BF)
            if guess is not None:
                continue
            place_BF = read.token_BA.shape[1] - f + above_BF
            hidden_BFD = after_BFD.gather(1, above_BF[..., None].expand(-1, -1, after_BFD.shape[-1]))
            level = ProcessedNodes(front_BF, place_BF, hidden_BFD)
            after_BFD, read = self._follow(rows, shape, depth, read, level)
        token_BN, parent_BN = torch.cat(tokens, dim=1), torch.cat(parents, dim=1)
        best = ops.prune(token_BN, parent_BN, torch.cat(scores, dim=1), torch.cat(beliefs, dim=1), m)
        window = rows.token_BM, rows.parent_BM, rows.score_BM, rows.belief_BM
        for to_BM, best_BM in zip(window, best, strict=True):
            to_BM[:, :m] = best_BM

    def _follow(
        self, rows: BatchRows, shape: DraftShape, depth: int, read: ProcessedNodes, level: ProcessedNodes
    ) -> tuple[Tensor, ProcessedNodes]:
        """Run the head on the frontier; return its output there, and all draft nodes processed so far.

        A chain continues from its last token; a tree is processed again from its root.
        """
        start_B = rows.length_B - 1
        if shape.topk == 1:
            return self._read(rows, level.token_BA, None, start_B + depth, level.hidden_BAD), read
        seen, read = read.token_BA.shape[1], read.then(level)
        return self._read(rows, read.token_BA, read.parent_BA, start_B, read.hidden_BAD)[:, seen:], read

    def _guess_block(self, rows: BatchRows, shape: DraftShape) -> Guess:
        """Run a block head; return how it guesses the children of a level's nodes, by their tokens."""
        head, root_B1 = cast(DraftBlock, self.head), rows.token_BM[:, :1]
        masks = torch.full((len(root_B1), head.block - 1), head.mask, device=root_B1.device)
        window = self.pack(rows, torch.cat([root_B1, masks], dim=1), None, rows.length_B, last=self.window)
        after_BSD = head.draft(window, self.arena)[:, : shape.num_steps]
        if not head.has_bias:
            levels = self._guess(after_BSD, rows, shape.topk, 1, apart=1)
            return partial(_repeat_level, levels)
        logits_BSV = head.logits(after_BSD.flatten(0, 1)).view(*after_BSD.shape[:2], -1)

        def guess(token_BF: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            b, f = token_BF.shape
            level_NV = logits_BSV[:, depth - 1 : depth].expand(-1, f, -1).contiguous().view(b * f, -1)
            logits_NV = self.kernels.add(level_NV, head.bias(token_BF.contiguous().view(-1)))
            token_NK, share_NK = self._rank(
                logits_NV, rows, shape.topk, repeat_rows(rows.length_B + depth, f)
            )
            return token_NK.view(b, f, -1), share_NK.view(b, f, -1)

        return guess

    def _guess(
        self, after_BFD: Tensor, rows: BatchRows, count: int, depth: int, *, apart: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return each node's best children; the first node's are at `depth`, the next `apart` deeper."""
        b, f, _ = after_BFD.shape
        tokens, shares = [], []
        for start in range(0, b, some := max(1, LOGITS // f)):
            part = rows.part(start, start + some)
            logits_NV = self.head.logits(after_BFD[start : start + some].flatten(0, 1))
            at_N = repeat_rows(part.length_B + depth, f)
            if apart:
                deeper_F = torch.arange(0, f * apart, apart, device=at_N.device)
                at_N = at_N + deeper_F.repeat(len(part.length_B))
            token_NK, share_NK = self._rank(logits_NV, part, count, at_N)
            tokens.append(token_NK.view(-1, f, token_NK.shape[1]))
            shares.append(share_NK.view(-1, f, share_NK.shape[1]))
        return torch.cat(tokens), torch.cat(shares)

    def _rank(self, logits_NV: Tensor, rows: BatchRows, count: int, at_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best tokens of some positions per row, by temperature and the noise of each position.

        The target's filters are left out: they cost as much as the rest and rarely change the best tokens.
        """
        f = len(at_N) // len(rows.length_B)
        # Temperature does not change the order; at temperature 0 no noise is added.
        sampling = Rules(repeat_rows(rows.temperature_B if self.noise else 0 * rows.temperature_B, f))
        return self.kernels.topk_with_noise(logits_NV, sampling, repeat_rows(rows.seed_B, f), at_N, count)

    def _read(
        self, rows: BatchRows, token_BA: Tensor, parent_BA: Tensor | None, start_B: Tensor, hidden_BAD: Tensor
    ) -> Tensor:
        """Run the head over a window per row; its KV cache uses the row's block table."""
        window = self.pack(rows, token_BA, parent_BA, start_B.clamp(min=0), last=self.window)
        hidden_TD = hidden_BAD.reshape(-1, hidden_BAD.shape[-1])
        return self.head.forward(window, hidden_TD, self.arena).view_as(hidden_BAD)


def _repeat_level(levels: tuple[Tensor, Tensor], token_BF: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the guesses of one of several levels [B, S, K] for all nodes of the level above."""
    token_BFK, share_BFK = (
        x_BSK[:, depth - 1 : depth].expand(-1, token_BF.shape[1], -1).contiguous() for x_BSK in levels
    )
    return token_BFK, share_BFK
