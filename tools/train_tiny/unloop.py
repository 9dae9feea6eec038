"""Train the trunk against loops: greedy output that repeats itself is made unlikely.

A small model under greedy decoding repeats itself, and repetition makes a text likelier still. So it answers
training prompts, and beside the usual loss on text it gets −log(1 − p) for each token that repeats a loop
(sequence-level unlikelihood). The text in each batch limits the damage to other predictions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.answers import PROMPT, some
from tools.train_tiny.pretrain import batch, cross_entropy
from tools.train_tiny.stage import Measured, Phase, Plan, Step
from tools.train_tiny.tokens import Stream
from tools.train_tiny.trunk import Trunk

LONGEST = 48
"""Longest period searched for."""
LEAST = 12
"""Minimum repeated tokens of a loop: code repeats short runs of itself."""
WEIGHT = 0.15
"""Weight of the loop loss beside text: at 1 the trunk forgets as much as it unlearns."""


def circling(ids_BT: Tensor) -> Tensor:
    """Return which answer tokens are in a loop: a whole period has just been repeated."""
    going = torch.zeros_like(ids_BT, dtype=torch.bool)
    for period in range(1, LONGEST + 1):
        same = ids_BT[:, period:] == ids_BT[:, :-period]
        needed = max(period, LEAST)
        run = same.unfold(1, needed, 1).all(-1)  # ends at token period + needed - 1 + i
        going[:, period + needed - 1 :] |= run
    going[:, :PROMPT] = False
    return going


def unloop_step(trunk: Trunk, stream: Stream, said: Stream, plan: Plan) -> Step:
    """Return a function that computes one step's loss: text, and as many rows of the trunk's own answers."""
    device = trunk.embed_tokens.weight.device
    said = said[circling(torch.from_numpy(said.astype("int64"))).any(-1).numpy()]
    loss_of = torch.compile(cross_entropy, dynamic=False)
    trunk.compile_layers()

    def step(at: int, phase: Phase) -> Measured:
        ids = batch(stream, at, phase, ahead=1, seed=plan.seed, device=device)
        own = some(said, at, phase.batch, plan.seed).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden, _ = trunk(ids[:, :-1])
            text = loss_of(hidden, trunk.embed_tokens.weight, ids[:, 1:])
            hidden, _ = trunk(own)
            logits = F.linear(hidden[:, PROMPT - 1 : -1], trunk.embed_tokens.weight).float()
        share = logits.softmax(-1).gather(-1, own[:, PROMPT:, None])[..., 0]
        going = circling(own)[:, PROMPT:]
        again = -(torch.log1p(-share.clamp(max=1 - 1e-4)) * going).sum() / going.sum().clamp(min=1)
        return Measured(text + WEIGHT * again, {"text": text.detach(), "again": again.detach()})

    return step
