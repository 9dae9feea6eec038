"""One step of a batch on the device: verify, walk, commit, draft. The host reads the result later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.device.drafting import DeviceDrafter
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.pack import Packer, WindowSlots, repeat_rows, rules
from specdec.core.device.result import ResultTensors, pack
from specdec.core.device.rows import BatchRows
from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.models.network import LOGITS, Network
from specdec.state_slots.arena import Arena


class DeviceStep:
    """The step function; all mutable state is in the rows and the arena.

    It never reads device tensors on the host, so a GPU can capture it.
    """

    def __init__(
        self,
        network: Network,
        drafter: DeviceDrafter | None,
        arena: Arena,
        pack: Packer,
        *,
        snapshots: bool,
        rates: Sequence[float] | None,
    ) -> None:
        """Give nodes state snapshots or records; accept drafts at `rates`, or by sampling if None."""
        self.network, self.drafter, self.arena, self.pack = network, drafter, arena, pack
        self.kernels, self.snapshots, self.has_states = network.kernels, snapshots, bool(arena.layout.states)
        device = arena.data.device
        self.rate_N = None if rates is None else torch.tensor(rates, dtype=torch.float64, device=device)

    def __call__(self, rows: BatchRows, key: GraphKey) -> Tensor:
        """Advance every row; return the packed result, which `PendingResult` reads."""
        m, before_B = key.nodes, rows.length_B.clone()
        token_BM, parent_BM = rows.token_BM[:, :m].clone(), rows.parent_BM[:, :m].clone()
        if not key.tree:
            # A window drafted as a tree is verified as a chain; its tokens remain valid guesses.
            parent_BM = torch.arange(-1, m - 1, device=token_BM.device).expand_as(token_BM)
        slots = self._slots(rows, m)
        window = self.pack(rows, token_BM, parent_BM if key.tree else None, before_B, slots)
        aux_hidden_layers = self.drafter.head.aux_hidden_layers if self.drafter else ()
        hidden_TD, aux = self.network.forward_with_aux(window, self.arena, aux_hidden_layers)
        chosen_BM = self._choose(hidden_TD, rows, key, window.position_T).view_as(token_BM)
        node_BM, count_B, emitted_BM = self._walk(chosen_BM, token_BM, parent_BM, rows)
        if key.tree:
            to_BM = before_B[:, None] + torch.arange(m, device=count_B.device)
            self.network.move(self.arena, rows.table_BN, before_B[:, None] + node_BM, to_BM)
        self._commit(rows, slots, node_BM, count_B)
        believed = rows.score_BM[:, :m], rows.belief_BM[:, :m]
        result_BX = pack(ResultTensors(count_B, node_BM, emitted_BM, token_BM, parent_BM, *believed))
        last_B1 = (count_B - 1).clamp(min=0)[:, None]
        rows.token_BM[:, :1] = torch.where(
            count_B[:, None] > 0, emitted_BM.gather(1, last_B1), token_BM[:, :1]
        )
        if self.drafter:
            read = min(m, rows.follows_BP.shape[1])
            hidden_BMD = self.drafter.head.combine_hidden_states(hidden_TD, aux).view(*token_BM.shape, -1)
            at_BRD = node_BM[:, :read, None].expand(-1, -1, hidden_BMD.shape[-1])
            rows.hidden_BPD[:, :read] = hidden_BMD.gather(1, at_BRD)
            rows.follows_BP[:, :read] = emitted_BM[:, :read]
            if key.reads:
                self.drafter.draft(rows, key, before_B, count_B, read)
        return result_BX

    def prefill_drafter(self, rows: BatchRows, key: GraphKey) -> None:
        """Draft the first windows from the head's pending hidden states."""
        if self.drafter:
            self.drafter.draft(rows, key, rows.start_B, rows.count_B, rows.follows_BP.shape[1])

    def _slots(self, rows: BatchRows, nodes: int) -> WindowSlots | None:
        """Return state inputs and outputs; nodes that may be rejected write records or snapshots."""
        if not self.has_states:
            return None
        if self.snapshots:
            snapshot_BM = rows.snapshot_BM[:, :nodes].contiguous() if nodes > 1 else None
            return WindowSlots(rows.state_B, None, None, None, snapshot_BM)
        record = None
        if nodes > 1:
            written = rows.slab_B2M[:, 0, :nodes], rows.place_B2M[:, 0, :nodes]
            record = RecordIds(*(ids_BM.contiguous() for ids_BM in written))
        return WindowSlots(rows.state_B, rows.path, rows.path_length_B, record, None)

    def _choose(self, hidden_TD: Tensor, rows: BatchRows, key: GraphKey, position_T: Tensor) -> Tensor:
        """Sample a token at every node, for the next position."""
        some = max(1, LOGITS // key.nodes)
        hidden_BMD = hidden_TD.view(len(rows.length_B), key.nodes, -1)
        position_BM = position_T.view(-1, key.nodes) + 1
        chosen = []
        for start in range(0, len(hidden_BMD), some):
            part = rows.part(start, start + some)
            logits_NV = self.network.project(hidden_BMD[start : start + some].flatten(0, 1))
            at_N = position_BM[start : start + some].flatten()
            sampling = rules(part, key.nodes, filtered=key.filtered)
            chosen.append(self.kernels.sample(logits_NV, sampling, repeat_rows(part.seed_B, key.nodes), at_N))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _walk(
        self, chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, rows: BatchRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the accepted nodes, their count, and the emitted tokens; padding rows accept none."""
        if self.rate_N is not None and token_BM.shape[1] > 1:
            chosen_BM, token_BM = self.kernels.accept_at_rates(
                *(chosen_BM, token_BM, parent_BM, self.rate_N, rows.seed_B, rows.length_B + 1)
            )
        node_BM, count_B = self.kernels.walk(chosen_BM, token_BM, parent_BM)
        emitted_BM = chosen_BM.gather(1, node_BM)
        count_B = torch.where(rows.length_B > 0, count_B, 0)
        beyond_BM = torch.arange(token_BM.shape[1], device=token_BM.device) >= count_B[:, None]
        return node_BM, count_B, emitted_BM.masked_fill(beyond_BM, NO_TOKEN)

    def _commit(self, rows: BatchRows, slots: WindowSlots | None, node_BM: Tensor, count_B: Tensor) -> None:
        """Promote each accepted path: its records become the row's path, or a snapshot the row's state."""
        if slots and slots.record:
            depth = min(node_BM.shape[1], rows.path_slab_BP.shape[1])
            path = RecordIds(rows.path_slab_BP[:, :depth], rows.path_index_BP[:, :depth])
            kept = node_BM[:, :depth], count_B, slots.record, path
            self.kernels.promote(*kept, rows.path_length_B, rows.length_B)
            # The next window writes the other set while it folds this path.
            rows.slab_B2M.copy_(rows.slab_B2M.flip(1))
            rows.place_B2M.copy_(rows.place_B2M.flip(1))
            return
        rows.path_length_B.zero_()
        if slots and slots.snapshot_BM is not None:
            gains_B1 = count_B[:, None] > 0
            last_B1 = torch.where(gains_B1, node_BM.gather(1, (count_B - 1).clamp(min=0)[:, None]), 0)
            before_B1, after_B1 = rows.state_B[:, None].clone(), slots.snapshot_BM.gather(1, last_B1)
            rows.state_B.copy_(torch.where(gains_B1, after_B1, before_B1)[:, 0])
            rows.snapshot_BM.scatter_(1, last_B1, torch.where(gains_B1, before_B1, after_B1))
        rows.length_B.add_(count_B)
