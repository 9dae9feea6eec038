"""A browser without a window, where one is installed: what a page comes to once its script has run."""

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def headless(profile: Path) -> list[str]:
    """Return the command that starts a browser; skip the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed (one of {', '.join(NAMES)})")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    return [program, *options, f"--user-data-dir={profile}", "--window-size=1280,900"]


def dom(page: Path, profile: Path) -> str:
    """Return a page's document as the browser holds it."""
    # Time runs on until what the page has begun is done.
    command = [*headless(profile), "--virtual-time-budget=500", "--dump-dom", page.as_uri()]
    run = subprocess.run(command, capture_output=True, check=True, timeout=120)
    return run.stdout.decode("utf-8")
