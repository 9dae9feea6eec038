"""Feed token sequences through a network in windows of given widths, as an engine would."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.kernels.table import Kernels, load_kernels
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights, read_network
from specdec.models.heads import Head, read_head
from specdec.models.network import MTPHead, Network, memory_layout
from specdec.models.rounded import CopiedWeights
from specdec.state_slots.arena import Arena
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window

CPU = torch.device("cpu")
MAX_LENGTH = 512


class Runner:
    """Owner of a network loaded from a folder and an arena that its sequences share."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        *,
        mtp: bool = False,
        copied: bool = False,
        eagle: Path | None = None,
        kernels: str | Kernels = "cpu",
        slabs: int = 40,
    ) -> None:
        checkpoint = Checkpoint(folder)
        self.spec = read_network(checkpoint)
        weights = open_weights(checkpoint, self.spec, dtype=dtype, mtp=mtp, progress=False)
        table = load_kernels(kernels) if isinstance(kernels, str) else kernels
        kept = CopiedWeights(weights)
        read = kept if copied else weights
        self.network = Network(self.spec, read, table, max_length=MAX_LENGTH, device=CPU)
        self.copy = kept.copy(self.network) if copied else None
        self.head: Head | None = MTPHead(self.network, weights) if mtp else None
        weights.finish()
        found = read_head(eagle, self.spec) if eagle else None
        if found:
            weights = found.open(dtype=dtype, device=CPU, progress=False)
            self.head = found.fill(self.network, weights, max_length=MAX_LENGTH)
            weights.finish()
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        own = found.layers if found else self.spec.mtp if mtp else ()
        self.layout = memory_layout(self.spec, dtype, head=own, state_dtype=state_dtype)
        blocks = self.layout.blocks_for(MAX_LENGTH)
        per_sequence = 2 * self.layout.slab_bytes + blocks * self.layout.block_bytes
        self.arena = Arena(self.layout, slabs * per_sequence, CPU)
        self.arena.data.view(torch.uint8).fill_(0xFF)  # NaN in every dtype, so that stray reads show
        self.conv_width = max((s.conv_inputs + 1 for s in self.layout.states), default=1)
        self._owners = 0

    def sequence(self) -> "Sequence_":
        self._owners += 1
        return Sequence_(self, self._owners)

    @torch.inference_mode()
    def step(
        self, parts: Sequence[tuple["Sequence_", Sequence[int]]], *, by: Network | None = None
    ) -> list[Tensor]:
        """Run each sequence's next tokens in one window; return the logits of each of them [M, V].

        `by` is another network over the same memory.
        """
        network = by or self.network
        rows = [Row(TokenTree.chain(tokens), own.length, own.table_N, own.state) for own, tokens in parts]
        window = build_window(rows, self.conv_width, CPU)
        aux_hidden_layers = self.head.aux_hidden_layers if self.head else ()
        hidden_TD, aux = network.forward_with_aux(window, self.arena, aux_hidden_layers)
        logits_TV = network.logits(hidden_TD)
        hidden_TD = self.head.combine_hidden_states(hidden_TD, aux) if self.head else hidden_TD
        out = []
        for (own, tokens), first in zip(parts, window.first_B, strict=True):
            own.length += len(tokens)
            own.hidden.append(hidden_TD[first : first + len(tokens)])
            out.append(logits_TV[first : first + len(tokens)])
        return out

    def read(self, tokens: Sequence[int], chunk: int) -> Tensor:
        """Run one sequence in chunks; return the logits of every token [T, V]."""
        own = self.sequence()
        pieces = [tokens[at : at + chunk] for at in range(0, len(tokens), chunk)]
        return torch.cat([self.step([(own, piece)])[0] for piece in pieces])


class Sequence_:
    """One sequence's blocks and state slot in the arena."""

    def __init__(self, runner: Runner, owner: int) -> None:
        blocks = runner.arena.take_blocks(owner, runner.layout.blocks_for(MAX_LENGTH))
        assert blocks is not None
        self.owner, self.table_N = owner, torch.tensor(blocks, dtype=torch.int64)
        state = runner.arena.take_state(owner) if runner.layout.states else 0
        assert state is not None
        self.state = state
        self.length = 0
        self.hidden: list[Tensor] = []
        """The head's input at each position; without a head, the last hidden states."""
