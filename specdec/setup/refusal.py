"""Refusals: texts shared by errors, documents and tests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a setting is refused, and the remedy; `field` is the setting."""

    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.remedy}."
