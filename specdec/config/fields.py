"""Constructors of common setting fields, with their descriptions."""

from typing import Any

from pydantic import Field


def integer(default: int | None, title: str, *, least: int = 1) -> Any:
    """Define an integer field; None is valid if it is the default."""
    return Field(
        default, ge=least, title=title, description=_or_none(default, f"an integer of at least {least}")
    )


def positive(default: float, title: str) -> Any:
    """Define a number above 0."""
    return Field(default, gt=0, title=title, description="a number above 0")


def number(default: float, title: str, *, least: int = 0) -> Any:
    """Define a number of at least `least`."""
    return Field(default, ge=least, title=title, description=f"a number of at least {least}")


def switch(default: bool, title: str) -> Any:
    """Define a boolean field."""
    return Field(default, title=title, description="True or False")


def path(title: str) -> Any:
    """Define a path field, which may be None."""
    return Field(None, title=title, description="a path, or None")


def text(default: str | None, title: str) -> Any:
    """Define a text field."""
    return Field(default, title=title, description="a string")


def _or_none(default: object, description: str) -> str:
    return f"{description}, or None" if default is None else description
