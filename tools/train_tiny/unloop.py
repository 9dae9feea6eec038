"""Teach the trunk not to go in circles: what it says greedily, and goes on repeating, is made unlikely.

A small model that takes its likeliest token repeats itself, and what it repeats becomes likelier still. So it
answers training prompts, and beside the usual loss on text it pays −log(1 − p) for every token of its own
that goes round again (sequence-level unlikelihood). The text read beside it wins back what that costs.
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
"""The longest circle that is looked for."""
LEAST = 12
"""Tokens that must have come again before one counts as a circle's: code repeats short runs of itself."""
WEIGHT = 0.15
"""What a circle counts beside text: at 1 the trunk forgets as much as it unlearns."""


def circling(ids_BT: Tensor) -> Tensor:
    """Tell which tokens of the answers go round again: those with which a whole circle was said twice."""
    going = torch.zeros_like(ids_BT, dtype=torch.bool)
    for period in range(1, LONGEST + 1):
        same = ids_BT[:, period:] == ids_BT[:, :-period]
        needed = max(period, LEAST)
        run = same.unfold(1, needed, 1).all(-1)  # ends at token period + needed - 1 + i
        going[:, period + needed - 1 :] |= run
    going[:, :PROMPT] = False
    return going


def unloop_step(trunk: Trunk, stream: Stream, said: Stream, plan: Plan) -> Step:
    """Make the function that takes one step's loss: text as before, and as many rows of its own answers."""
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
