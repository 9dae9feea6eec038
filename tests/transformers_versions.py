"""Compare logits with the oldest and newest supported transformers: `python -m tests.transformers_versions`.

The installed release is left out: the other tests run with it. Others are downloaded from PyPI into build/,
once, without their dependencies.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHOSEN = ("-m", "not exhaustive", "tests/models/test_options.py")
"""One draw per family of all its fields. Not each value: 5.23 ignores `q_lora_rank` in Ling-3.0."""


def releases() -> tuple[str, ...]:
    """Return the oldest supported release and the pinned one, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    found = [re.fullmatch(r"transformers[>=]=([\d.]+)", requirement) for requirement in requirements]
    oldest, newest = (own[1] for own in found if own)
    return oldest, newest


def environment(release: str) -> dict[str, str]:
    """Return the environment that puts a release before the installed one, downloading it if needed."""
    folder = ROOT / "build" / f"transformers-{release}"
    if not (folder / f"transformers-{release}.dist-info").exists():
        wanted = ["--no-deps", "--target", str(folder), f"transformers=={release}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def main(options: list[str]) -> int:
    """Run the comparisons under each release; return the first failure's exit code."""
    for release in releases():
        if release == version("transformers"):
            print(f"not run, transformers {release}: the other tests run with it", flush=True)
            continue
        variables = environment(release)
        shown = "import transformers; print('transformers', transformers.__version__)"
        printed = subprocess.run([sys.executable, "-c", shown], env=variables, capture_output=True, text=True)
        print(printed.stdout or printed.stderr, end="", flush=True)
        if printed.stdout.split() != ["transformers", release]:
            return 1
        ended = subprocess.run([sys.executable, "-m", "pytest", *options, *CHOSEN], env=variables, cwd=ROOT)
        if ended.returncode:
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
