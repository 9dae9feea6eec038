"""The options of each benchmark: a field is a command-line option with its help and its check."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.config.base import Settings
from specdec.config.fields import integer, positive, switch, text

LLAMA_CPP = "llama.cpp"
"""The llama.cpp peer: a program, or a package."""

Counts = list[Annotated[int, Field(ge=1)]]


def numbers(default: list[int] | None, title: str) -> Any:
    return Field(default, min_length=1, title=title, description="integers of at least 1, with commas")


def names(default: list[str] | None, title: str) -> Any:
    return Field(default, title=title, description="names, with commas")


class ThroughputOptions(Settings):
    """Options of `specdec bench throughput`."""

    model: str | None = None
    seed: int | None = None
    """The engine's seed, also used for prompts and random weights."""
    shape: str = text("tiny", "without MODEL: random weights of a named size")
    batch: Counts = numbers([1, 4, 16], "rows, with commas")
    prompt_tokens: Counts = numbers([32, 512], "tokens of a prompt, with commas")
    new_tokens: int = integer(32, "decode steps")
    peers: list[str] = names([], "transformers, llama.cpp, URLs of servers, with commas")
    llama_server: Path | None = Field(
        None,
        title="llama.cpp's server (default: that on PATH, else the package xllamacpp)",
        description="a program",
    )
    repeats: int = integer(5, "counted runs")
    warmup: int = integer(1, "uncounted runs", least=0)
    random: bool = switch(False, "draw the weights of --shape on the device; nothing is written")
    profile: bool = switch(False, "with --random: time by kernel, and the share of idle time")


class ModelOptions(Settings):
    """The step described by `specdec bench model`."""

    shape: str = text("qwen3-next-80b-a3b", "a named size")
    quantize: Literal["fp8", "int8", "int4"] | None = Field(
        None, title="format of large matrices", description="fp8, int8, int4 or None"
    )
    batch: int = integer(1, "rows")
    window: int = integer(4, "tokens verified per row")
    context: int = integer(0, "tokens before the window", least=0)
    acceptance: float = Field(1.0, ge=1, title="tokens accepted per step", description="a number from 1 on")
    draft_steps: int | None = integer(None, "passes of the head (default: window - 1)", least=0)
    draft_topk: int = integer(1, "draft tokens per pass")
    slots: Literal["record", "snapshot"] = Field(
        "record", title="the backing of draft slots: record or snapshot", description="record or snapshot"
    )
    bandwidth: str = text("4.3TB", "bytes per second, an H200's by default")


class PromptOptions(Settings):
    """Selection of the prompts to send."""

    prompts: Path | None = Field(
        None, title="JSON lines, or .txt (default: the sets that ship)", description="a file"
    )
    category: list[str] = names([], "only these categories, with commas")
    limit: int | None = integer(None, "maximum prompts of each category")


class ServeOptions(PromptOptions):
    """Options of `specdec bench serve`."""

    url: str
    model: str | None = text(None, "model name (default: the first of /v1/models)")
    chat: bool = switch(False, "use /v1/chat/completions, with the server's chat template")
    concurrency: Counts = numbers([1, 4, 16], "concurrent requests, with commas")
    requests: int | None = integer(None, "requests at each concurrency (default: 4 times it, at least 16)")
    rate: float | None = Field(
        None,
        gt=0,
        title="Poisson arrivals per second, at most CONCURRENCY in flight",
        description="a number above 0",
    )
    max_tokens: int = integer(128, "max_tokens of each request")
    temperature: float = Field(0.0, ge=0, title="sampling temperature", description="a number from 0 on")
    ignore_eos: bool = switch(False, "request outputs of full length")
    seed: int = integer(0, "seed of prompt order, arrivals and sampling", least=0)
    api_key_env: str | None = text(None, "the environment variable that holds the key")
    warmup: int | None = integer(None, "uncounted requests before each (default: its concurrency)", least=0)
    timeout: float = positive(600.0, "timeout of a request in seconds")


class AcceptanceArguments(PromptOptions):
    """Options of `specdec bench acceptance` that are not swept."""

    max_tokens: int = integer(128, "maximum output tokens", least=2)
    ignore_eos: bool = switch(False, "continue after the model's EOS tokens")
    seed: int = integer(0, "sampling seed", least=0)
    warmup: int = integer(
        4, "uncounted prompts of each setting; 0: one, and what it taught is discarded", least=0
    )
    peers: list[Literal["transformers"]] = names([], "also measure transformers")
    memory: str | None = text(
        None, "memory of all engines without the weights (default: half of what is free); one always runs"
    )


class PrefixOptions(Settings):
    """Options of `specdec bench prefix`."""

    model: str
    trace: list[Literal["lmsys", "sharegpt", "agents", "system-prompts"]] = Field(
        ["system-prompts"],
        min_length=1,
        title="lmsys, sharegpt, agents or system-prompts, with commas",
        description="lmsys, sharegpt, agents or system-prompts, with commas",
    )
    seed: int = integer(0, "of the requests", least=0)
    requests: int = integer(64, "requests of each trace")
    together: int = integer(1, "concurrent requests")
    max_tokens: int = integer(8, "max_tokens of each request")


ReachPart = Literal["wire", "serve", "steady"]


class ReachOptions(Settings):
    """Options of `specdec bench reach`; each engine has one core and one thread."""

    model: str = "tiny"
    only: list[ReachPart] = Field(
        ["wire", "serve", "steady"],
        min_length=1,
        title="only these measurements, with commas",
        description="wire, serve or steady, with commas",
    )
    shape: str | None = text(None, "wire: the layout of a named size (default: MODEL's)")
    prompt_tokens: int = integer(1024, "tokens of a prompt", least=65)
    max_tokens: int = integer(64, "max_tokens of each request", least=2)
    requests: int = integer(24, "requests per route and round")
    rate: float = Field(
        1.5, gt=0, title="Poisson arrivals per second and route", description="a number above 0"
    )
    rounds: int = integer(3, "counted rounds, which alternate the routes")
    writers: int = integer(2, "steady: requests decoding while prompts arrive")
    long_tokens: int = integer(4000, "steady: tokens of those prompts", least=65)
    cores: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=2,
        max_length=2,
        title="cores of the two engines, such as 0,1 (default: the first two)",
        description="two numbers of cores",
    )
    seed: int | None = None
    """The engine's seed, also used for prompts, arrivals and sampling."""
