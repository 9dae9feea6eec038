"""A headless browser, if installed."""

import shutil
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def headless(profile: Path) -> list[str]:
    """Return the command that starts a browser; skip the test without one."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed (one of {', '.join(NAMES)})")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    return [program, *options, f"--user-data-dir={profile}", "--window-size=1280,900"]
