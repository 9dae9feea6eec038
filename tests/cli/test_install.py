"""An installed specdec is importable from scripts in any folder; and its wheel is complete."""

import os
import re
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
    """Make a clone named specdec, without large files."""
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
    """Install that clone as `pip install -e` does, into a folder that replaces our own install."""
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


def test_a_script_next_to_a_clone_imports_the_installed_package(clone: Path, site: Path) -> None:
    script = clone.parent / "script.py"
    script.write_text(
        "import specdec; print(specdec.__file__, specdec.__version__, specdec.SamplingParams.__name__)"
    )
    own = os.environ | {"PYTHONPATH": str(site)}
    for cwd in (clone.parent, clone, site):
        ran = subprocess.run([sys.executable, script], cwd=cwd, env=own, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith(str(clone / "specdec" / "__init__.py"))


def test_the_wheel_has_every_file_and_no_gpu(tmp_path: Path) -> None:
    """A plain install works on a CPU: GPU packages are only in an extra."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    left_out = shutil.ignore_patterns(
        "__pycache__", "built", "results", "LOG.md", "loss.svg"
    )  # the log's measurements are not shipped
    shutil.copytree(ROOT / "specdec", tmp_path / "specdec", ignore=left_out)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("specdec/**/*") if path.is_file()}
    build = "import setuptools.build_meta as own; print(own.build_wheel('dist'))"
    ran = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with zipfile.ZipFile(tmp_path / "dist" / ran.stdout.split()[-1]) as wheel:
        info, own = (
            {name for name in wheel.namelist() if (".dist-info/" in name) is is_info}
            for is_info in (True, False)
        )
        metadata = wheel.read(next(name for name in info if name.endswith("/METADATA"))).decode()
    assert own == there
    needs = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    plain = {re.match(r"[\w-]+", need)[0] for need in needs if "extra ==" not in need}  # type: ignore[index]
    assert {"torch", "transformers", "pyyaml"} <= {name.lower() for name in plain}
    assert not any(re.search("cuda|nvidia|triton|flashinfer|xllamacpp", name) for name in plain)
    assert any(need.startswith("triton") and 'extra == "cuda"' in need for need in needs)
