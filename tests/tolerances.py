"""How far two right implementations may lie apart. No environment variable changes these."""

import torch

KERNEL_FLOAT64 = 1e-12
"""An operation against its reference, relative and absolute, in float64."""
KERNEL_FLOAT32 = 1e-5
"""The same in float32."""
KERNEL_BFLOAT16 = 1e-2
"""The same in bfloat16, whose steps are 2^-8 apart: up to three roundings of a result."""
KERNEL_FLOAT16 = 2e-3
"""The same in float16, whose steps are 2^-11 apart."""
KERNEL = {torch.float64: KERNEL_FLOAT64, torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_BFLOAT16}

LOGITS_RELATIVE = 1e-4
"""Of float32 logits against transformers, as a norm."""

FP8_LOGITS = 1e-5
"""Of float32 logits with 8-bit weights against those weights widened beforehand, as a norm."""

WIDENED_LOGITS = 1e-5
"""The same of weights of whole numbers that are widened as they are read."""
PACKED_LOGITS = 5e-3
"""Of float32 logits by whole numbers against plain torch that rounds the same rows, as a norm. Where an entry
lies between two whole numbers, sums in another order may take the other one; most seen: 1e-3."""

BFLOAT16_UNIT = 2**-8
"""How far two bfloat16 readings may lie apart where the reference's own two coincide, relative to a token's
logits: one step of their 8 bits. transformers' logits are themselves rounded by up to half of it."""
BFLOAT16_ASTRAY = 1
"""Models, of the eight of a family, that may lie further off. Most seen: none, and 1 of the next sixteen."""

BFLOAT16_FURTHER = 1.2
"""How many times as far as transformers' logits ours may lie from those in float32: the mean of six models,
which round in other places. Seen: 1.07."""

BFLOAT16_EQUAL = 0.99
"""Entries of an operation that are those of transformers in bfloat16, bit for bit; a sum in another order may
round a few of the others by one step."""
BFLOAT16_ATTENTION = 0.85
"""The same of attention in C, where torch's exponential may be another on another processor."""

FLOAT64_LOGITS = 1e-6
"""Of float64 logits against our own in another window: gates and softmax keep some float32."""

DRIFT_FLOAT32 = 1e-4
"""Of a float32 state after 4,000 tokens in windows of drafts, against the same tokens fed, as a norm."""

FLOAT32_GAP = 1e-4
"""Of two tokens' perturbed logits in float64: closer, float32 may take either, by the window's width."""

TENSOR_CORE_GAP = 5e-3
"""The same where tensor cores may multiply float32 by its first ten bits."""
EXCUSED_TEXTS = 0.05
"""The part of the texts that may end up excused by such a gap; more of them are no chance."""
