"""Train the checkpoint that ships: `python -m tools.train_tiny --out FOLDER`."""

import argparse
import sys
from pathlib import Path

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.setup.devices import pick_device
from tools.train_tiny.recipe import recipe
from tools.train_tiny.run import train


def main(argv: list[str] | None = None) -> int:
    """Train according to the options; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    add = parser.add_argument
    add("--out", metavar="FOLDER", type=Path, required=True, help="where the checkpoint is written")
    add("--recipe", default="tiny", help="what is trained: tiny (hours), sketch (minutes) (default: tiny)")
    add("--work", metavar="FOLDER", type=Path, help="checkpoints of a stopped run (default: OUT/work)")
    add("--seed", metavar="NUMBER", type=int, default=0, help="of every draw (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<number> (default: auto)")
    args = parser.parse_args(argv)
    work = args.work or args.out / "work"
    try:
        if args.seed < 0:
            raise ConfigError(f"--seed: {args.seed} is below 0; give an integer from 0", field="seed")
        plan = recipe(args.recipe).seeded(args.seed)
        device = pick_device(EngineConfig(device=args.device).device)
        for folder in (args.out, work):
            folder.mkdir(parents=True, exist_ok=True)
        figures = train(plan, args.out, work, device)
    except (ConfigError, OSError) as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nStopped; the same command continues from {work}.")
        return 130
    print(
        f"{args.out}: held-out loss {figures['loss']:.3f}, first guess right in {figures['first_guess']:.1%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
