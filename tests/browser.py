"""A browser without a window, where one is installed: what a page comes to once its script has run."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def dom(page: Path, profile: Path) -> str:
    """Return a page's document as the browser holds it; skip the test where there is no browser."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed (one of {', '.join(NAMES)})")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    # Time runs on until what the page has begun is done.
    options += [f"--user-data-dir={profile}", "--window-size=1280,900", "--virtual-time-budget=500"]
    run = subprocess.run(
        [program, *options, "--dump-dom", page.as_uri()], capture_output=True, check=True, timeout=120
    )
    return run.stdout.decode("utf-8")
