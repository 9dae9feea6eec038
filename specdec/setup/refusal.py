"""Why something is refused: the words that errors, documents and tests share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is refused, and what to do instead; `field` is the setting that asks for it."""

    field: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.remedy}."
