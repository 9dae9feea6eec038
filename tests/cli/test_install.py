"""What an installed specdec is to scripts, wherever they lie."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clone that is named specdec, without what is large."""
    clone = tmp_path_factory.mktemp("beside") / "specdec"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        clone.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, clone)
    shutil.copytree(
        ROOT / "specdec", clone / "specdec", ignore=shutil.ignore_patterns("assets", "__pycache__")
    )
    return clone


@pytest.fixture(scope="module")
def site(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install that clone as `pip install -e` does, into a folder that is read in place of our own install."""
    site = tmp_path_factory.mktemp("site")
    build = f"import setuptools.build_meta as own; print(own.build_editable({str(site)!r}))"
    ran = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with zipfile.ZipFile(site / ran.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    (site / "sitecustomize.py").write_text(
        "import os, site, sys\n"
        "sys.path[:] = [own for own in sys.path if not os.path.exists(own + '/specdec/__init__.py')]\n"
        f"site.addsitedir({str(site)!r})\n"
    )
    return site


def test_a_script_beside_a_clone_imports_what_is_installed(clone: Path, site: Path) -> None:
    script = clone.parent / "script.py"
    script.write_text(
        "import specdec; print(specdec.__file__, specdec.__version__, specdec.SamplingParams.__name__)"
    )
    own = os.environ | {"PYTHONPATH": str(site)}
    for cwd in (clone.parent, clone, site):
        ran = subprocess.run([sys.executable, script], cwd=cwd, env=own, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith(str(clone / "specdec" / "__init__.py"))
