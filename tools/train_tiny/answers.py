"""The trunk's greedy continuations of training text, and batches of them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec import EngineConfig, SamplingParams, SpecEngine
from tools.train_tiny.tokens import Stream

PROMPT, ANSWER = 128, 128


def answers(folder: Path, stream: Stream, *, count: int, seed: int) -> Stream:
    """Continue prompts from the training text greedily; return prompts with their answers [N, T]."""
    places = np.random.default_rng((seed, 1)).integers(0, len(stream) - PROMPT, count)
    prompts = [stream[at : at + PROMPT].tolist() for at in places.tolist()]
    config = EngineConfig(draft="none", max_running=32, max_model_len=PROMPT + ANSWER, memory_bytes=1 << 29)
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with SpecEngine(folder, config) as engine:
        said = engine.generate(prompts, params)
    rows = [prompt + list(own.token_ids) for prompt, own in zip(prompts, said, strict=True)]
    return np.array(rows, dtype=np.uint16)


def some(said: Stream, step: int, size: int, seed: int) -> Tensor:
    """Return the answers [N, T] of a training step."""
    chosen = np.random.default_rng((seed, step)).integers(0, len(said), size)
    return torch.from_numpy(said[chosen].astype("int64"))
