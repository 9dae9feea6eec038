"""How far two right implementations may lie apart. No environment variable changes these."""

import torch

KERNEL_FLOAT64 = 1e-12
"""An operation against its reference, relative and absolute, in float64."""
KERNEL_FLOAT32 = 1e-5
"""The same in float32."""
KERNEL_BFLOAT16 = 1e-2
"""The same in bfloat16, whose steps are 2^-8 apart: up to three roundings of a result."""
KERNEL = {torch.float64: KERNEL_FLOAT64, torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_BFLOAT16}

LOGITS_RELATIVE = 1e-4
"""Of float32 logits against transformers, as a norm."""

BFLOAT16_GAP = 1.5
"""Our distance from float32 over that of transformers in bfloat16, median token. Most seen: 1.24."""

FLOAT64_LOGITS = 1e-6
"""Of float64 logits against our own in another window: gates and softmax keep some float32."""
