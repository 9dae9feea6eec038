"""The command line of training."""

import argparse
from pathlib import Path

from specdec.config.options import Run
from specdec.errors import ConfigError


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specdec train`."""
    parser.set_defaults(command=_train)
    add = parser.add_argument
    add("--out", metavar="FOLDER", type=Path, required=True, help="where the checkpoint is written")
    add("--recipe", default="tiny", help="what is trained: tiny (hours), sketch (minutes) (default: tiny)")
    add(
        "--work",
        metavar="FOLDER",
        type=Path,
        help="keeps what a stopped run goes on from (default: OUT/work)",
    )
    add("--seed", metavar="NUMBER", type=int, default=0, help="of every draw (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<number> (default: auto)")


def _train(args: argparse.Namespace) -> Run:
    from specdec.bench.plots import require_matplotlib
    from specdec.config.engine import EngineConfig
    from specdec.setup.devices import pick_device
    from specdec.train.recipe import recipe
    from specdec.train.run import train

    if args.seed < 0:
        raise ConfigError(f"--seed: {args.seed} is below 0; give an integer from 0", field="seed")
    require_matplotlib()  # for the loss curve, hours later
    plan = recipe(args.recipe).seeded(args.seed)
    device = pick_device(EngineConfig(device=args.device).device)
    out, work = args.out, args.work or args.out / "work"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file; name a folder", field="out")
    for name, folder in (("out", out), ("work", work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--{name}: {folder} cannot be made ({error.strerror}); name another", field=name
            ) from error

    def run() -> None:
        try:
            figures = train(plan, out, work, device)
        except KeyboardInterrupt:
            print(f"\nStopped; the same command goes on from {work}.")
            raise
        print(
            f"{out}: held-out loss {figures['loss']:.3f}, first guess right in {figures['first_guess']:.1%}"
        )

    return run
