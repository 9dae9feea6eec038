"""Allowed differences between correct implementations. No environment variable changes them."""

import torch

KERNEL_FLOAT64 = 1e-12
"""An operation against its reference in float64, relative and absolute."""
KERNEL_FLOAT32 = 1e-5
"""An operation against its reference in float32."""
KERNEL_BFLOAT16 = 1e-2
"""An operation against its reference in bfloat16, whose steps are 2^-8: up to three roundings of a result."""
KERNEL_FLOAT16 = 2e-3
"""An operation against its reference in float16, whose steps are 2^-11."""
KERNEL = {torch.float64: KERNEL_FLOAT64, torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_BFLOAT16}

LOGITS_RELATIVE = 1e-4
"""Float32 logits against transformers, by norm."""

FP8_LOGITS = 1e-5
"""Float32 logits with 8-bit weights against those weights dequantized beforehand, by norm."""

WIDENED_LOGITS = 1e-5
"""The same for integer weights that are dequantized when read."""
PACKED_LOGITS = 5e-3
"""Float32 logits with integer products against plain torch that rounds the same rows, by norm. An entry
between two integers may round either way if sums are reordered; largest seen: 1e-3."""

BFLOAT16_UNIT = 2**-8
"""Difference of two bfloat16 runs where the reference's own two runs agree, relative to a token's logits: one
step of their 8 bits. transformers' logits are themselves rounded by up to half of it."""
BFLOAT16_ASTRAY = 1
"""Models, of a family's eight, that may differ more. Most seen: none, and 1 of the next sixteen."""

BFLOAT16_FURTHER = 1.2
"""Ratio of our distance to the float32 logits to transformers' distance: the mean of six models, which round
at different points. Seen: 1.07."""

BFLOAT16_EQUAL = 0.99
"""Share of an operation's entries equal to transformers' in bfloat16, bit for bit; a reordered sum may round
others by one step."""
BFLOAT16_ATTENTION = 0.85
"""The same for attention in C; torch's exponential may differ between processors."""

FLOAT64_LOGITS = 1e-6
"""Float64 logits against our own with another window: gates and softmax use some float32."""

DRIFT_FLOAT32 = 1e-4
"""A float32 state after 4,000 tokens in draft windows, against the same tokens without drafts, by norm."""

FLOAT32_GAP = 1e-4
"""Gap of two tokens' perturbed logits in float64: below it, float32 may choose either, depending on the
window's width."""

TENSOR_CORE_GAP = 5e-3
"""The same with TF32 tensor cores, which multiply float32 by its first ten bits."""
EXCUSED_TEXTS = 0.05
"""Largest share of texts that may be excused by such a gap; more cannot be chance."""
