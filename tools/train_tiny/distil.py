"""Distil the trunk's predictions into a draft head, through the head's own recursion."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.answers import some
from tools.train_tiny.heads import Head
from tools.train_tiny.pretrain import batch
from tools.train_tiny.stage import Measured, Phase, Plan, Step
from tools.train_tiny.tokens import Stream
from tools.train_tiny.trunk import Trunk

FADE = 0.8
"""Weight of each deeper step relative to the previous one: it is reached less often."""


def head_step(head: Head, trunk: Trunk, stream: Stream, said: Stream, plan: Plan, steps: int) -> Step:
    """Return a function that computes one step's loss: cross entropy to the trunk, `steps` deep.

    Half of a batch's rows are text; the other half are prompts with the trunk's answers, as drafts are
    verified.
    """
    embed_VD = trunk.embed_tokens.weight.detach()
    device = embed_VD.device

    def ask(ids_BT: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden, aux = trunk(ids_BT, head.aux_hidden_layers)
        return hidden, F.linear(hidden, embed_VD), aux

    def loss_of(hidden: Tensor, logits: Tensor, aux: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        length = hidden.shape[1] - steps
        state = head.first(hidden[:, :length], [x[:, :length] for x in aux])
        total, agreed = hidden.new_zeros(()), []
        for j, out in enumerate(head.unroll(state, ids, embed_VD, steps), 1):
            wanted = logits[:, j : j + length]
            guess = F.log_softmax(F.linear(out, head.output(embed_VD)).float(), -1)
            share = head.choose(wanted.float().softmax(-1))
            total = total - FADE ** (j - 1) * (share * guess).sum(-1).mean()
            agreed.append((guess.argmax(-1) == head.choose(wanted).argmax(-1)).float().mean())
        return total / sum(FADE**j for j in range(steps)), torch.stack(agreed)

    trunk.compile_layers()
    compiled = torch.compile(loss_of, dynamic=False)

    def step(at: int, phase: Phase) -> Measured:
        text = replace(phase, batch=phase.batch - phase.batch // 2)
        read = batch(stream, at, text, ahead=0, seed=plan.seed, device=device)
        own = some(said, at, phase.batch // 2, plan.seed)[:, -phase.length :]
        ids = torch.cat([read, own.to(device)])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                hidden, logits, aux = ask(ids)
            loss, agreed = compiled(hidden, logits, aux, ids)
        return Measured(loss, {f"agree {j}": share for j, share in enumerate(agreed.tolist(), 1)})

    return step


@torch.no_grad()
def agreement(
    head: Head, trunk: Trunk, stream: Stream, steps: int, *, length: int, rows: int = 8
) -> list[float]:
    """Return, by depth, the share of held-out positions at which the head's top token is the trunk's."""
    embed_VD = trunk.embed_tokens.weight
    count = len(stream) // length
    cut = torch.from_numpy(stream[: count * length].astype("int64")).view(count, length).to(embed_VD.device)
    right = torch.zeros(steps, device=embed_VD.device)
    for ids in torch.split(cut, rows):
        hidden, aux = trunk(ids, head.aux_hidden_layers)
        best = F.linear(hidden, embed_VD).argmax(-1)
        roots = length - steps
        state = head.first(hidden[:, :roots], [x[:, :roots] for x in aux])
        for j, out in enumerate(head.unroll(state, ids, embed_VD, steps), 1):
            guess = head.name(F.linear(out, head.output(embed_VD)).argmax(-1))
            right[j - 1] += (guess == best[:, j : j + roots]).sum()
    return (right / (count * (length - steps))).tolist()
