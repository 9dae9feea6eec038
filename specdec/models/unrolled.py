"""Draft a chain in one pass: each level reads the previous level's token without host synchronisation."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.sampling.rules import COLUMNS, Rules
from specdec.kernels.table import Kernels
from specdec.models.replay import Replays
from specdec.state_slots.arena import Arena
from specdec.state_slots.window import Window


class UnrollableHead(Protocol):
    """A draft head, as in `draft.head`."""

    def forward(self, window: Window, hidden_TD: Tensor, memory: Arena) -> Tensor: ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...


class Unrolled:
    """Runs a head recursively on its own drafts."""

    def __init__(self, head: UnrollableHead, kernels: Kernels) -> None:
        self.head, self.kernels = head, kernels
        self._replays = Replays(self._run, kernels)

    def __call__(
        self, window: Window, memory: Arena, after_BD: Tensor, rules: Rules, seed_B: Tensor, levels: int
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and their probabilities by level [B, L], from the head's output at the roots.

        The window has one token per row, at the position after its root. Each token is the best one by the
        rules, with the noise of its position.
        """
        (group,) = window.groups
        longest = replace(group, max_length=group.max_length + levels)
        level_L1 = torch.arange(levels + 1, device=seed_B.device)[:, None]
        position_LB, length_LB = window.position_T + level_L1, group.length_B + level_L1
        tensors = after_BD, position_LB, length_LB, seed_B, rules.temperature_N
        window = Window(window.token_T, window.position_T, (longest,), window.first_B)
        filters = rules.filters
        if any(part is not None for part in filters):  # filters are not replay inputs: run directly
            token_BL, share_BL = self._run(window, memory, *tensors, levels=levels, filters=filters)
        else:
            token_BL, share_BL = self._replays(window, memory, *tensors, levels=levels)
        return token_BL, share_BL

    def _run(
        self,
        window: Window,
        memory: Arena,
        after_BD: Tensor,
        position_LB: Tensor,
        length_LB: Tensor,
        seed_B: Tensor,
        temperature_B: Tensor,
        *,
        levels: int,
        filters: tuple[Tensor | None, ...] = (None,) * (len(COLUMNS) - 1),
    ) -> tuple[Tensor, ...]:
        (group,), rules = window.groups, Rules.of((temperature_B, *filters))
        tokens, shares = [], []
        for level in range(levels):
            logits_BV = self.head.logits(after_BD)
            token_B1, share_B1 = self.kernels.topk_with_noise(
                logits_BV, rules, seed_B, position_LB[level + 1], 1
            )
            tokens.append(token_B1)
            shares.append(share_B1)
            if level + 1 < levels:
                next_ = replace(group, length_B=length_LB[level])
                read = replace(window, token_T=token_B1[:, 0], position_T=position_LB[level], groups=(next_,))
                after_BD = self.head.forward(read, after_BD, memory)
        return self.kernels.concat(*tokens), self.kernels.concat(*shares)
