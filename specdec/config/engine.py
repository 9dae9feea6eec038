"""Engine settings."""

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
from specdec.config.fields import integer, switch
from specdec.errors import ConfigError

MAX_WINDOW = 64
"""Maximum window width that steps support."""

NonEmpty = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=0, le=1)]

DTYPES = MappingProxyType({"half": "float16", "float": "float32"})
"""Further names used by torch and vLLM."""


def _whole_dtype(value: object) -> object:
    return DTYPES.get(value, value) if isinstance(value, str) else value


PREFIX_FIELDS = ("prefix_policy", "prefix_alpha", "host_cache_bytes")
"""Settings that need the prefix cache."""
HEAD_FIELDS = ("draft_model", "draft_vocab", "draft_window")
"""Settings that need a draft head."""
*_FIRST, _LAST = (AUTO, NONE, *DRAFTER_OPTIONS)


class EngineConfig(Settings):
    """How an engine runs. None and "auto" leave the choice to the engine.

    Contradictions raise: drafting settings with `draft="none"`, a `draft_model` for a drafter without own
    weights, a tree for a chain drafter, and more `num_draft_tokens` than `num_steps` and `topk` can grow, the
    root included.
    """

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        title="device that runs the model; auto: the GPU if torch finds one, else the CPU",
        description="auto, cpu, cuda or cuda:<number>",
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"], BeforeValidator(_whole_dtype)
    ] = Field(
        "auto",
        title="compute dtype; auto: the checkpoint's. On a CPU auto is float32 for float16, and for "
        "bfloat16 without C kernels, or without AVX-512, or up to 64 MiB of weights",
        description="auto, float32 (or float), bfloat16, float16 (or half) or float64",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        title="dtype of the KV cache; auto: as dtype; fp8: e4m3 without a scale",
        description="auto or fp8",
    )
    quantize: Literal["fp8", "int8", "int4"] | None = Field(
        None,
        title="quantize large matrices at load; int8: a scale per output; int4: a scale per 32 inputs, "
        "output matrix int8; fp8: blocks of 128; a CPU widens it",
        description="fp8, int8, int4 or None",
    )
    draft: Annotated[str, AfterValidator(known_drafter)] = Field(
        AUTO,
        title="the drafter; auto: the head of draft_model, else the model's multi-token head, and on a CPU "
        "suffix; " + "; ".join(f"{name}: {own.help}" for name, own in DRAFTER_OPTIONS.items()),
        description=f"{', '.join(_FIRST)} or {_LAST}",
    )
    draft_model: NonEmpty | None = Field(
        None,
        title="weights of an EAGLE (1 to 3.1), DFlash or DSpark head; None: eagle3, eagle or dflash in the "
        "model's folder",
        description="a draft head's folder, OWNER/NAME of one on the hub, or None",
    )
    draft_vocab: int | None = Field(
        None,
        ge=1,
        title="tokens that a head may draft: the most frequent by token_counts.json, else the first by id",
        description="an integer of at least 1, or None for all",
    )
    draft_window: int | None = Field(
        None,
        ge=1,
        title="tokens that a head attends to, rounded up to a block of 16",
        description="an integer of at least 1, or None for all",
    )
    num_steps: int | None = integer(
        None, "maximum depth of a draft; None: 5, a block head's block, or as num_draft_tokens implies"
    )
    topk: int | None = Field(
        None,
        ge=1,
        title="maximum children of a draft token; None: 4, or 1 if there is no room for a tree",
        description="an integer of at least 1 (1 drafts a chain), or None",
    )
    num_draft_tokens: int | None = Field(
        None,
        ge=2,
        le=MAX_WINDOW,
        title="maximum tokens verified in a step, root included; None: 8, or num_steps + 1 if larger or "
        "a chain",
        description=f"an integer from 2 (the root and one draft) to {MAX_WINDOW}, or None",
    )
    adaptive: bool = switch(
        True,
        "choose each step's draft, or none, by measured cost and acceptance; False: always the largest draft",
    )
    draft_noise: bool = switch(
        True,
        "rank draft tokens with the target's sampling noise; False: by logits alone. Outputs do not change",
    )
    slots: Literal["record", "snapshot"] = Field(
        "record",
        title="what a draft token stores: a record of its state update, or the whole state",
        description="record or snapshot",
    )
    memory_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None,
        ge=1,
        le=MAX_BYTES,
        title="memory for KV cache, states and drafts, without the weights; None: enough for "
        "max_running sequences of max_model_len, at most 40 % of free memory, on a GPU 80 %",
        description='a number of bytes such as 2147483648 or "2GiB", or None',
    )
    max_running: int = integer(256, "maximum running sequences; others wait")
    max_model_len: int | None = integer(
        None,
        "maximum tokens per sequence, prompt and output; None: the model's limit, or what memory_bytes holds",
        least=2,
    )
    chunk_tokens: int = integer(512, "maximum prefill tokens per step, in addition to decoding")
    prefix_cache: bool = switch(
        True, "reuse KV cache and states of shared prefixes; uses memory that is otherwise free"
    )
    prefix_policy: Literal["tuned", "lru", "flops"] = Field(
        "tuned",
        title="which prefixes are evicted first; lru: least recently used; flops: adds prefix_alpha × "
        "prefill work saved per byte; tuned: finds that weight",
        description="tuned, lru or flops",
    )
    prefix_alpha: float | None = Field(
        None,
        ge=0,
        le=1000,
        title="weight of saved work against recency, for flops; None: 1",
        description="a number from 0 to 1000, or None",
    )
    host_cache_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        0,
        ge=0,
        le=MAX_BYTES,
        title="host memory for evicted prefixes, loaded again where that beats prefill; 0: none",
        description='a number of bytes such as 2147483648 or "2GiB"; 0 for none',
    )
    kernels: Literal["auto", "reference", "cpu", "native", "triton", "flashinfer"] = Field(
        "auto",
        title="implementation of operations; auto: triton on a GPU; on a CPU native (C) for float32 and "
        "bfloat16 if a compiler is found, else cpu (torch); flashinfer: triton with FlashInfer's "
        "attention; reference: slow",
        description="auto, reference, cpu, native, triton or flashinfer",
    )
    graphs: bool | None = Field(
        None,
        title="run all-decode steps on the device: CUDA graphs, or tapes on a CPU; None: on a GPU, and "
        "with native kernels unless self-int4 drafts",
        description="True, False, or None",
    )
    tp: int = Field(
        1,
        ge=1,
        le=64,
        title="tensor parallelism: processes that divide heads, widths and the vocabulary; memory_bytes is "
        "each one's. On CPUs only",
        description="an integer from 1 to 64",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        title="seed from which requests without one derive theirs; None: random",
        description="an integer of 64 bits, or None",
    )
    synthetic_acceptance: Annotated[float, Field(ge=1)] | list[Rate] | None = Field(
        None,
        title="for benchmarks on random weights: accept drafts at this length or these rates. The text "
        "is then meaningless",
        description="an acceptance length of at least 1, a list of rates by depth from 0 to 1, or None",
    )

    @classmethod
    def of(cls, config: "EngineConfig | None", fields: Mapping[str, object]) -> "EngineConfig":
        """Return `config` updated with `fields`; without either, the defaults."""
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config cannot be {config!r}; give an EngineConfig or None.", field="config")
        values = {name: getattr(config, name) for name in config.model_fields_set} if config else {}
        return cls.model_validate({**values, **fields})

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
                f"draft={self.draft!r} has no weights of its own; leave it out or choose "
                f"{' or '.join(drafters_of_folders())}.",
            )

    def _check_tree(self) -> None:
        """Raise for more tokens than a chain or tree of that depth and width has nodes."""
        if only_chains(self.draft) and (self.topk or 1) > 1:
            raise contradiction(
                "topk", f"draft={self.draft!r} drafts chains only; leave it out or choose another drafter."
            )
        topk = 1 if only_chains(self.draft) else self.topk
        if self.num_draft_tokens is None or self.num_steps is None or topk is None:
            return
        max_nodes = 1 + topk + topk**2 * (self.num_steps - 1)
        if self.num_draft_tokens > max_nodes:
            raise contradiction(
                "num_draft_tokens",
                f"num_steps={self.num_steps} and topk={topk} grow at most {max_nodes} tokens, with the root, "
                f"not {self.num_draft_tokens}; lower it or raise "
                f"{'num_steps' if only_chains(self.draft) else 'the other two'}.",
            )
