"""The acceptance benchmark's command line."""

import argparse
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

from specdec.bench.acceptance.prompts import choose
from specdec.bench.acceptance.settings import DEFAULT_BOUNDS, Sweep
from specdec.bench.commands import out_folder
from specdec.bench.options import AcceptanceArguments
from specdec.bench.plots import require_matplotlib
from specdec.bench.report import add_json
from specdec.config.drafters import AUTO, DRAFTER_OPTIONS, NONE
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_options, add_settings, at_least, listed, one_of, settings_from
from specdec.config.sampling import SamplingParams
from specdec.draft.proposal import DraftShape
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models

DEFAULT_SHAPES = (DraftShape(4, 1, 5), DraftShape(4, 4, 16))
DEFAULT_TREE = 16
"""Default tree size, in tokens."""
DRAFTS = (AUTO, *DRAFTER_OPTIONS, NONE)
SWEPT = {
    *("draft", "num_steps", "topk", "num_draft_tokens", "adaptive", "draft_noise", "draft_vocab"),
    *("draft_window", "seed", "prefix_cache", "prefix_policy", "prefix_alpha", "host_cache_bytes"),
    *("memory_bytes", "max_running", "max_model_len", "synthetic_acceptance"),
}
"""Engine settings that the benchmark sets itself."""
ABOUT = """\
Measure acceptance length and speedup. All settings, `none` included, alternate on every batch of prompts,
and every output is compared with that of `none`. The model is loaded once for each kind of draft head and
each --draft-vocab; engines share its weights, each with its own memory for sequences. If --memory holds
fewer engines than there are settings, the least recently used one is rebuilt at its turn. With --out an
interrupted run continues when it is repeated. The columns are explained below the table."""


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Add the options of the acceptance benchmark."""
    parser.set_defaults(command=_acceptance)
    parser.description, parser.formatter_class = ABOUT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help=GIVEN)
    _add_sweep(parser.add_argument_group("swept settings, with commas"))
    add_options(parser, AcceptanceArguments)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="folder for measurements, results and plots (needs matplotlib)",
    )
    add_json(parser)
    add_settings(parser, EngineConfig, title="engine", without=SWEPT)


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    sweep, counts = group.add_argument, listed(at_least(1))
    sweep(
        "--draft",
        metavar="NAMES",
        type=listed(one_of(*DRAFTS)),
        default=[AUTO],
        help=f"{', '.join(DRAFTS)} (default: auto); none is always measured",
    )
    sweep("--num-steps", metavar="STEPS", type=counts, help="depth of drafts")
    sweep("--topk", metavar="TOKENS", type=counts, help="children of a draft token; 1 drafts a chain")
    sweep(
        "--num-draft-tokens",
        metavar="TOKENS",
        type=counts,
        help="tokens verified in a step, the root included",
    )
    sweep(
        "--shape",
        metavar="STEPS:TOPK:TOKENS",
        type=listed(_shape),
        help="shapes, instead of all combinations of these three (default: 4:1:5,4:4:16)",
    )
    sweep(
        "--adaptive",
        metavar="STEPS:TOPK:TOKENS",
        nargs="?",
        type=_shape,
        const=DEFAULT_BOUNDS,
        help="also measure adaptive drafts, within this shape (default: the engine's bounds)",
    )
    sweep(
        "--temperature", metavar="TEMPERATURES", type=listed(_temperature), default=[0.0], help="default: 0"
    )
    sweep("--batch", metavar="ROWS", type=counts, default=[1], help="batch sizes (default: 1)")
    sweep(
        "--draft-noise",
        metavar="NOISE",
        type=listed(one_of("shared", "none")),
        default=["shared"],
        help="when sampling, rank a head's tokens with the target's noise, or without (default: shared)",
    )
    some = listed(at_least(0))
    sweep(
        "--draft-vocab",
        metavar="TOKENS",
        type=some,
        default=[0],
        help="tokens that a head may draft, the most frequent or first ones; 0: all (default: 0)",
    )
    sweep(
        "--draft-window",
        metavar="TOKENS",
        type=some,
        default=[0],
        help="last tokens that a head attends to; 0: all (default: 0)",
    )


def _acceptance(args: argparse.Namespace) -> Run:
    _, config = find_models(args.model, _engine(args))
    # Imported late: other commands do not need torch or the benchmark's packages.
    from specdec.bench.acceptance.measure import AnswerLength
    from specdec.bench.acceptance.run import AcceptanceOptions, run

    given, out = settings_from(args, AcceptanceArguments), out_folder(args)
    if out.path is not None:
        require_matplotlib()
    options = AcceptanceOptions(
        model=args.model,
        sweep=_sweep(args, transformers=bool(given.peers)),
        prompts=choose(given.prompts, given.category, given.limit),
        length=AnswerLength(given.max_tokens, given.ignore_eos),
        seed=given.seed,
        warmup=given.warmup,
        memory=EngineConfig.model_validate({"memory_bytes": given.memory}).memory_bytes,
        arguments=_arguments(args, given),
    )
    return partial(run, options, config, out)


def _engine(args: argparse.Namespace) -> EngineConfig:
    """Return the engine settings given beside the swept ones."""
    given = {name: value for name, value in vars(args).items() if name not in SWEPT}
    return settings_from(argparse.Namespace(**given), EngineConfig)


def _sweep(args: argparse.Namespace, *, transformers: bool) -> Sweep:
    return Sweep(
        drafts=args.draft,
        shapes=_shapes(args),
        chosen=args.adaptive,
        temperatures=args.temperature,
        batches=args.batch,
        noises=args.draft_noise,
        vocabs=[tokens or None for tokens in args.draft_vocab],
        windows=[tokens or None for tokens in args.draft_window],
        transformers=transformers,
    )


def _shapes(args: argparse.Namespace) -> list[DraftShape]:
    """Return the shapes given by --shape, or all products of the three numbers."""
    products = {"num_steps": args.num_steps, "topk": args.topk, "num_draft_tokens": args.num_draft_tokens}
    given = [name for name, values in products.items() if values]
    if args.shape and given:
        option = given[0].replace("_", "-")
        raise ConfigError(f"--{option}: --shape says it already; give one of the two", field=given[0])
    if args.shape or not given:
        return list(args.shape or DEFAULT_SHAPES)
    shapes = []
    for steps, topk in itertools.product(args.num_steps or [4], args.topk or [1]):
        default = steps + 1 if topk == 1 else max(DEFAULT_TREE, steps + 1)
        shapes += [DraftShape(steps, topk, tokens) for tokens in args.num_draft_tokens or [default]]
    return shapes


def _arguments(args: argparse.Namespace, given: AcceptanceArguments) -> dict[str, Any]:
    """Return the arguments for the report, with all defaults filled in."""
    left = {"command", "verbose", "out", "json", "model", "num_steps", "topk", "num_draft_tokens"}
    shown = {name: value for name, value in vars(args).items() if name not in left}
    shown |= given.model_dump(mode="json")
    shown["shape"] = [_written(shape) for shape in _shapes(args)]
    shown["adaptive"] = _written(args.adaptive) if args.adaptive else None
    return shown


def _written(shape: DraftShape) -> str:
    return f"{shape.num_steps}:{shape.topk}:{shape.num_draft_tokens}"


def _shape(text: str) -> DraftShape:
    """Parse STEPS:TOPK:TOKENS."""
    found = re.fullmatch(r"([1-9]\d{0,3}):([1-9]\d{0,3}):([1-9]\d{0,3})", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write STEPS:TOPK:TOKENS, such as 4:4:16")
    return DraftShape(*map(int, found.groups()))


def _temperature(text: str) -> float:
    try:
        return SamplingParams.model_validate({"temperature": float(text)}).temperature
    except (ValueError, ConfigError):
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature; give numbers from 0 on") from None
