"""Train the trunk to predict the next token."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.stage import Measured, Phase, Plan, Step
from tools.train_tiny.tokens import Stream, windows
from tools.train_tiny.trunk import Trunk


def batch(stream: Stream, step: int, phase: Phase, *, ahead: int, seed: int, device: torch.device) -> Tensor:
    """Return a step's windows with `ahead` more tokens each."""
    cut = windows(stream, step=step, batch=phase.batch, length=phase.length + ahead, seed=seed)
    return torch.from_numpy(cut.astype("int64")).to(device)


def cross_entropy(hidden_BTD: Tensor, embed_VD: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean loss of next-token prediction."""
    logits = F.linear(hidden_BTD, embed_VD).float()
    return F.cross_entropy(logits.flatten(0, 1), target_BT.flatten())


def trunk_step(trunk: Trunk, stream: Stream, plan: Plan) -> Step:
    """Return a compiled function that computes one step's loss."""
    device = trunk.embed_tokens.weight.device
    loss_of = torch.compile(cross_entropy, dynamic=False)
    trunk.compile_layers()

    def step(at: int, phase: Phase) -> Measured:
        ids = batch(stream, at, phase, ahead=1, seed=plan.seed, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden, _ = trunk(ids[:, :-1])
            return Measured(loss_of(hidden, trunk.embed_tokens.weight, ids[:, 1:]), {})

    return step


@torch.no_grad()
def held_out_loss(trunk: Trunk, stream: Stream, *, length: int, rows: int = 8) -> tuple[float, float]:
    """Return the loss and top-1 accuracy over a held-out stream."""
    device = trunk.embed_tokens.weight.device
    count = (len(stream) - 1) // length
    loss = right = 0.0
    for at in range(0, count, rows):
        starts: Sequence[int] = [i * length for i in range(at, min(at + rows, count))]
        ids = torch.stack([torch.from_numpy(stream[s : s + length + 1].astype("int64")) for s in starts])
        ids = ids.to(device)
        hidden, _ = trunk(ids[:, :-1])
        logits = F.linear(hidden, trunk.embed_tokens.weight)
        loss += float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        right += float((logits.argmax(-1) == ids[:, 1:]).sum())
    return loss / (count * length), right / (count * length)
