"""What a user may set of an engine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from specdec.config.base import MAX_BYTES, Settings, contradiction, parse_bytes
from specdec.config.drafters import (
    AUTO,
    DRAFTER_OPTIONS,
    NONE,
    drafters_of_folders,
    known_drafter,
    only_chains,
)
from specdec.errors import ConfigError

MAX_WINDOW = 64
"""The widest window that can be recorded."""

NonEmpty = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=0, le=1)]

DTYPES = MappingProxyType({"half": "float16", "float": "float32"})
"""What torch and vLLM call these too."""


def _whole_dtype(value: object) -> object:
    return DTYPES.get(value, value) if isinstance(value, str) else value


PREFIX_FIELDS = ("prefix_policy", "prefix_alpha", "host_cache_bytes")
"""What only a cache of prefixes has a use for."""
HEAD_FIELDS = ("draft_model", "draft_vocab", "draft_window")
"""What only a head has a use for."""
*_FIRST, _LAST = (AUTO, NONE, *DRAFTER_OPTIONS)


class EngineConfig(Settings):
    """How an engine runs. None and "auto" leave the choice to the engine.

    Contradictory: settings of drafting with `draft="none"`, a `draft_model` for a drafter that has none
    of its own, a tree for one that drafts chains, and more `num_draft_tokens` than `num_steps` and `topk` can
    grow, the root counted.
    """

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        title="where the model runs; auto: the GPU where torch finds one, else the CPU",
        description="auto, cpu, cuda or cuda:<number>",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"], BeforeValidator(_whole_dtype)
    ] = Field(
        "auto",
        title="what is computed in; auto: as the checkpoint is stored, but on a CPU float32 for float16, for "
        "bfloat16 where no C form multiplies it (without AVX-512, or for up to 64 MiB of weights)",
        description="auto, float32 (or float), bfloat16, float16 (or half) or float64",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        title="what keys and values are kept in; auto: dtype; fp8: 8 bits (e4m3), without a scale",
        description="auto or fp8",
    )
    quantize: Literal["fp8", "int8", "int4"] | None = Field(
        None,
        title="round large matrices as they are loaded; int8: with a scale for each output; int4: with one "
        "for each 32 inputs, and the output matrix in int8; fp8: as published ones are, for a GPU: a CPU "
        "widens it again and saves nothing",
        description="fp8, int8, int4 or None",
    )
    draft: Annotated[str, AfterValidator(known_drafter)] = Field(
        AUTO,
        title="the drafter; auto: the head of draft_model, or else the model's multi-token head, where it "
        "has one, with suffixes on a CPU; "
        + "; ".join(f"{name}: {own.help}" for name, own in DRAFTER_OPTIONS.items()),
        description=f"{', '.join(_FIRST)} or {_LAST}",
    )
    draft_model: NonEmpty | None = Field(
        None,
        title="weights of an EAGLE head (1 to 3) in safetensors; None: for eagle the folder eagle3 or eagle "
        "in the model's own",
        description="a draft head's folder, OWNER/NAME of one on the hub, or None",
    )
    draft_vocab: int | None = Field(
        None,
        ge=1,
        title="a head drafts only so many tokens, the commonest by token_counts.json in the model's folder, "
        "without it the first by id; fewer rows of its output are read",
        description="a whole number of at least 1, or None for all",
    )
    draft_window: int | None = Field(
        None,
        ge=1,
        title="a head's attention reads so many of the last tokens, and the rest of the block of 16 that the "
        "first of them lies in",
        description="a whole number of at least 1, or None for all",
    )
    num_steps: int | None = Field(
        None,
        ge=1,
        title="how deep a draft is at most; None: 5, or what num_draft_tokens implies",
        description="a whole number of at least 1, or None",
    )
    topk: int | None = Field(
        None,
        ge=1,
        title="children of a drafted token at most; None: 4, but 1 where num_steps or num_draft_tokens are "
        "given and leave no room for a tree",
        description="a whole number of at least 1 (1 drafts a chain), or None",
    )
    num_draft_tokens: int | None = Field(
        None,
        ge=2,
        le=MAX_WINDOW,
        title="tokens verified in a step at most, the last certain one counted; None: 8, or num_steps + 1 "
        "for a chain and for a deeper tree",
        description=f"a whole number from 2 (the root and one draft) to {MAX_WINDOW}, or None",
    )
    adaptive: bool = Field(
        True,
        title="measure, and draft each step what pays, nothing included; False: always the largest draft",
        description="True or False",
    )
    draft_noise: bool = Field(
        True,
        title="rank a head's or a copy's guesses with the noise by which the target will choose; False: by "
        "its logits alone, to measure what the noise is worth; it changes no text",
        description="True or False",
    )
    slots: Literal["record", "snapshot"] = Field(
        "record",
        title="what a draft token keeps: the record of what it adds to the state, or the whole state",
        description="record or snapshot",
    )
    memory_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None,
        ge=1,
        le=MAX_BYTES,
        title="memory for sequences and drafts, beside the weights; None: what max_running sequences of "
        "max_model_len need, at most 40 % of what is free beside the weights, on a GPU 80 %",
        description='a number of bytes such as 2147483648 or "2GiB", or None',
    )
    max_running: int = Field(
        256,
        ge=1,
        title="sequences that take part in a step at most; others wait",
        description="a whole number of at least 1",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        title="tokens of a sequence at most, prompt and output; None: the model's own limit, or what "
        "memory_bytes holds where that is less",
        description="a whole number of at least 2, or None",
    )
    chunk_tokens: int = Field(
        512,
        ge=1,
        title="tokens of prompts that one step reads at most, beside the sequences that write",
        description="a whole number of at least 1",
    )
    prefix_cache: bool = Field(
        True,
        title="keep what requests have read, in memory that is free otherwise, for those that begin alike",
        description="True or False",
    )
    prefix_policy: Literal["tuned", "lru", "flops"] = Field(
        "tuned",
        title="prefixes evicted first: lru those used longest ago; flops weighs in, by prefix_alpha, "
        "the work that they save for their bytes; tuned finds that weight by trying, beside the engine",
        description="tuned, lru or flops",
    )
    prefix_alpha: float | None = Field(
        None,
        ge=0,
        le=1000,
        title="weight of the work saved beside recency, for prefix_policy flops; None: 1",
        description="a number from 0 to 1000, or None",
    )
    host_cache_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        0,
        ge=0,
        le=MAX_BYTES,
        title="memory of the host for prefixes that have to be evicted, fetched again where that takes less "
        "time than to read them; 0: they are forgotten",
        description='a number of bytes such as 2147483648 or "2GiB"; 0 for none',
    )
    kernels: Literal["auto", "reference", "cpu", "native", "triton", "flashinfer"] = Field(
        "auto",
        title="how operations are computed; auto: on a CPU native (C) in float32 and bfloat16 where there is "
        "a C compiler, on a GPU triton, else cpu (plain torch); flashinfer: triton's, but FlashInfer attends "
        "where it can; reference is the slow specification",
        description="auto, reference, cpu, native, triton or flashinfer",
    )
    graphs: bool | None = Field(
        None,
        title="let the device decide the steps in which every row decodes: captured as graphs on a GPU, "
        "played from tapes on a CPU; None: on a GPU, and with native kernels unless look-ups alone draft",
        description="True, False, or None",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        title="what the seeds of requests that give none are drawn from; None: from the system",
        description="a whole number of 64 bits, or None",
    )
    synthetic_acceptance: Annotated[float, Field(ge=1)] | list[Rate] | None = Field(
        None,
        title="for benchmarks on random weights: accept drafts at this length or these rates, whatever they "
        "say; the text is then no model's",
        description="an acceptance length of at least 1, a list of rates by depth from 0 to 1, or None",
    )

    @classmethod
    def of(cls, config: "EngineConfig | None", fields: Mapping[str, object]) -> "EngineConfig":
        """Return `config` with `fields` in place of its own; neither given, the defaults."""
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config cannot be {config!r}; give an EngineConfig or None.", field="config")
        given = {name: getattr(config, name) for name in config.model_fields_set} if config else {}
        return cls.model_validate({**given, **fields})

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_draft()
        self._check_tree()
        return self

    def _check_draft(self) -> None:
        if self.draft == NONE:
            for field in (*HEAD_FIELDS, "num_steps", "topk", "num_draft_tokens", "synthetic_acceptance"):
                if getattr(self, field) is not None:
                    raise contradiction(
                        field, 'it has no meaning with draft="none"; choose a drafter or leave it out.'
                    )
        elif self.draft_model is not None and self.draft not in (AUTO, *drafters_of_folders()):
            raise contradiction(
                "draft_model",
                f"draft={self.draft!r} reads no weights of its own; leave it out or choose "
                f"{' or '.join(drafters_of_folders())}.",
            )

    def _check_tree(self) -> None:
        """Refuse more tokens than a chain or a tree of that depth and width has nodes."""
        if only_chains(self.draft) and (self.topk or 1) > 1:
            raise contradiction(
                "topk", f"draft={self.draft!r} drafts chains alone; leave it out or choose another drafter."
            )
        topk = 1 if only_chains(self.draft) else self.topk
        if self.num_draft_tokens is None or self.num_steps is None or topk is None:
            return
        most = 1 + topk + topk**2 * (self.num_steps - 1)
        if self.num_draft_tokens > most:
            raise contradiction(
                "num_draft_tokens",
                f"num_steps={self.num_steps} and topk={topk} grow at most {most} tokens, with the root, "
                f"not {self.num_draft_tokens}; lower it or raise "
                f"{'num_steps' if only_chains(self.draft) else 'the other two'}.",
            )
