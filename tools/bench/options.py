"""The options of each benchmark: a field is a command-line option with its help and its check."""

from typing import Annotated, Literal

from pydantic import Field

from specdec.bench.options import SpeedOptions
from specdec.config.base import Settings
from specdec.config.fields import integer, switch, text


class RandomOptions(SpeedOptions):
    """Options of `python -m tools.bench random`."""

    shape: str = text("tiny", "a named size")
    profile: bool = switch(False, "also show the time by kernel, and the share of idle time")


class ModelOptions(Settings):
    """The step described by `python -m tools.bench model`."""

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


class PrefixOptions(Settings):
    """Options of `python -m tools.bench prefix`."""

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
    """Options of `python -m tools.bench reach`; each engine has one core and one thread."""

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
