"""The options of each benchmark: a field is a command-line option with its help and its check."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.config.base import Settings
from specdec.config.engine import EngineConfig
from specdec.config.fields import integer, positive, switch, text
from specdec.errors import ConfigError

LLAMA_CPP = "llama.cpp"
"""The llama.cpp peer: a program, or a package."""

Counts = list[Annotated[int, Field(ge=1)]]


def numbers(default: list[int] | None, title: str) -> Any:
    return Field(default, min_length=1, title=title, description="integers of at least 1, with commas")


def names(default: list[str] | None, title: str) -> Any:
    return Field(default, title=title, description="names, with commas")


def refuse_ranks(config: EngineConfig) -> None:
    """Raise if the model would run in several processes: these benchmarks share its weights among engines."""
    if config.tp > 1:
        raise ConfigError("tp: this benchmark measures one process; use tp=1, or bench serve", field="tp")


class SpeedOptions(Settings):
    """What a speed benchmark runs, and how often."""

    seed: int | None = None
    """The engine's seed, also used for prompts and random weights."""
    shape: str = text("tiny", "without MODEL: random weights of a named size")
    batch: Counts = numbers([1, 4, 16], "rows, with commas")
    prompt_tokens: Counts = numbers([32, 512], "tokens of a prompt, with commas")
    new_tokens: int = integer(32, "decode steps")
    repeats: int = integer(5, "counted runs")
    warmup: int = integer(1, "uncounted runs", least=0)


class ThroughputOptions(SpeedOptions):
    """Options of `specdec bench throughput`."""

    model: str | None = None
    peers: list[str] = names([], "transformers, llama.cpp, URLs of servers, with commas")
    llama_server: Path | None = Field(
        None,
        title="llama.cpp's server (default: that on PATH, else the package xllamacpp)",
        description="a program",
    )


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
