"""Fields of settings that several have: each with what it takes, in words."""

from typing import Any

from pydantic import Field


def integer(default: int | None, title: str, *, least: int = 1) -> Any:
    """Take an integer; None too where that is the default."""
    return Field(
        default, ge=least, title=title, description=_or_none(default, f"an integer of at least {least}")
    )


def positive(default: float, title: str) -> Any:
    """Take a number above 0."""
    return Field(default, gt=0, title=title, description="a number above 0")


def number(default: float, title: str, *, least: int = 0) -> Any:
    """Take a number that is not below the least one."""
    return Field(default, ge=least, title=title, description=f"a number of at least {least}")


def switch(default: bool, title: str) -> Any:
    """Take True or False."""
    return Field(default, title=title, description="True or False")


def path(title: str) -> Any:
    """Take a path, or None."""
    return Field(None, title=title, description="a path, or None")


def text(default: str | None, title: str) -> Any:
    """Take a text."""
    return Field(default, title=title, description="a text")


def _or_none(default: object, says: str) -> str:
    return f"{says}, or None" if default is None else says
