"""Time the steps of an EngineCore."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.bench.agreement import gaps, last_logits
from specdec.bench.peers import Sample
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.core.request import Request
from specdec.errors import ConfigError
from specdec.kernels.native.instruction_sets import describe_kernels
from specdec.setup.build import LoadedModel, assemble, build

ENGINE = "specdec"


class EngineRunner:
    """Run an EngineCore in this thread: the cost of a step without queues and detokenization."""

    def __init__(self, model: LoadedModel, name: str = ENGINE) -> None:
        self.model, self.name = model, name
        model.core.warm_up()

    @classmethod
    def load(cls, folder: Path, config: EngineConfig) -> "EngineRunner":
        """Build a model to run."""
        return cls(build(folder, config))

    def plain(self) -> "EngineRunner":
        """Return a runner with the same weights and its own memory, without drafts."""
        settings = replace(self.model.settings, drafters=(), synthetic=None)
        core = assemble(self.model.network, None, settings)
        return EngineRunner(replace(self.model, core=core, settings=settings), f"{ENGINE}, draft none")

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Time each step of the loop.

        Prefill ends with the step in which the last row gets its first token; a step counts as decoding if
        every row takes part.
        """
        core = self.model.core
        requests = self.submit(prompts, new_tokens)
        prefill_s, step_s, tokens, silent_s = 0.0, [], 0, 0.0
        while core.has_work:
            reading = not all(request.output_length for request in requests)
            decoding = not reading and all(request.finish_reason is None for request in requests)
            before = sum(request.output_length for request in requests)
            start_s = time.perf_counter()
            core.step()
            took_s = time.perf_counter() - start_s
            if reading:
                prefill_s += took_s
            elif decoding:
                # A device step's tokens appear only after the next launch: count both as one step.
                silent_s += took_s
                if gained := sum(request.output_length for request in requests) - before:
                    step_s.append(silent_s)
                    tokens, silent_s = tokens + gained, 0.0
        if not step_s:
            raise ConfigError(
                f"batch: no step had all {len(prompts)} rows decoding, as the first ended before the last "
                "was prefilled; lower batch, or raise new_tokens, chunk_tokens or memory_bytes.",
                field="batch",
            )
        outputs = (tuple(request.tokens[request.prompt_length :]) for request in requests)
        per_step = tokens / (len(step_s) * len(requests))
        return Sample(prefill_s, tuple(step_s), tuple(outputs), per_step)

    def judge(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Tensor:
        """Return the `gaps` of each row's chosen tokens by this engine's logits, computed in one pass."""
        rows = zip(prompts, outputs, strict=True)
        return torch.stack(
            [
                gaps(last_logits(self.model, [*prompt, *output[:-1]], len(output)), output)
                for prompt, output in rows
            ]
        )

    def submit(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
        """Queue requests for 1 + `new_tokens` tokens each."""
        core = self.model.core
        # Runs repeat the same prompts: drafting from the last run's outputs would measure a replay.
        core.loop.disable_sharing()
        params = SamplingParams(max_tokens=1 + new_tokens, temperature=0.0, ignore_eos=True)
        requests = [core.new_request(prompt, params, seed=row) for row, prompt in enumerate(prompts)]
        return [core.add_request(request) for request in requests]

    def describe(self) -> dict[str, Any]:
        """Describe the kernels and the drafters in use."""
        settings = self.model.settings
        return {
            "kernels": describe_kernels(self.model.network.kernels.name),
            "drafters": list(settings.drafters),
            "slots": settings.config.slots,
            "synthetic_acceptance": settings.synthetic,
        }
