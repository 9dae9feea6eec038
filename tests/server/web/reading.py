"""What a person at the playground does with it and reads from it."""

from typing import Any

from tests.server.live import Answer
from tests.server.web.devtools import Tab

KEY = "given"
"""What the server of these tests wants."""
DONE = "document.getElementById('status').textContent.startsWith('Done')"


def said(tab: Tab, element: str) -> str:
    return str(tab.look(f"document.getElementById('{element}').textContent"))


def is_shown(tab: Tab, element: str) -> bool:
    return bool(tab.look(f"!document.getElementById('{element}').hidden"))


def figures(tab: Tab, pane: str = "first") -> dict[str, float]:
    """Read the raw figures of an answer."""
    found = tab.look(
        f"Object.fromEntries([...document.querySelectorAll('#{pane} [data-figure]')]"
        ".map(e => [e.dataset.figure, Number(e.dataset.value)]))"
    )
    return dict(found)


def pieces(tab: Tab, pane: str = "first") -> list[list[Any]]:
    """Read the coloured text: each part with its origin."""
    return list(
        tab.look(
            f"[...document.querySelectorAll('#{pane} .from')].map(e => [e.textContent, +e.dataset.origin])"
        )
    )


def text_of(parts: list[list[Any]]) -> str:
    return "".join(text for text, _ in parts)


def heard(tab: Tab) -> list[Any]:
    """Return the events of the last answer."""
    data = tab.look("window.heard.at(-1)")
    return Answer(200, {}, data.encode()).events


def asked(tab: Tab) -> list[Any]:
    """Return the bodies that the page has sent."""
    return list(tab.look("window.asked"))


def choices(events: list[Any], name: str) -> list[Any]:
    return [own for event in events for choice in event["choices"] for own in choice[name]]


def send(tab: Tab, prompt: str | None = None, **fields: Any) -> None:
    """Fill the form in and press Ctrl-Enter in the prompt."""
    for name, value in fields.items():
        tab.write(name, str(value))
    tab.look("document.getElementById('prompt').focus()")
    if prompt is not None:
        tab.write("prompt", prompt)
    tab.press("Enter", "ctrl")


def enter_key(tab: Tab) -> None:
    """Write the key, leave its field, and wait until the page knows what is served."""
    tab.write("key", KEY)
    tab.look("document.getElementById('key').blur()")
    tab.wait("document.getElementById('model').textContent.includes('drafts: ')")
