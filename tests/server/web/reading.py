"""Actions and readings of a person using the playground."""

from typing import Any

from tests.server.live import Answer
from tests.server.web.devtools import Tab

KEY = "given"
"""The server's API key."""
ENDED = "document.querySelector('.answer') && document.getElementById('stop').hidden"
LAST = ".exchange:last-child"
STREAM = """(() => {
  const real = window.fetch;
  const start = (control) => {
    const send = (data) => control.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
    window.stream = {
      say: (...events) => { for (const own of events) send(JSON.stringify(own)); },
      end: () => { send("[DONE]"); control.close(); },
    };
  };
  window.asked = [];
  window.fetch = async (path, options) => {
    if (!path.startsWith("v1/c")) return real(path, options);
    window.asked.push(JSON.parse(options.body));
    return new Response(new ReadableStream({ start }));
  };
})()"""
"""Answers as the test says, for texts that the model of these tests does not generate."""


def said(tab: Tab, element: str) -> str:
    return str(tab.look(f"document.getElementById('{element}').textContent"))


def words(tab: Tab, selector: str) -> list[str]:
    """Return the texts of elements."""
    return list(tab.look(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)"))


def is_shown(tab: Tab, selector: str) -> bool:
    visible = f"document.querySelector({selector!r})?.checkVisibility({{visibilityProperty: true}})"
    return bool(tab.look(visible))


def figures(tab: Tab, pane: str = LAST) -> dict[str, float]:
    """Return an answer's raw figures."""
    found = tab.look(
        f"Object.fromEntries([...document.querySelectorAll('{pane} [data-figure]')]"
        ".map(e => [e.dataset.figure, Number(e.dataset.value)]))"
    )
    return dict(found)


def pieces(tab: Tab, pane: str = LAST) -> list[list[Any]]:
    """Return the coloured parts of the text with their origins."""
    return list(
        tab.look(
            f"[...document.querySelectorAll('{pane} .from')].map(e => [e.textContent, +e.dataset.origin])"
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


def fill(tab: Tab, **fields: Any) -> None:
    """Fill in the settings, and close them."""
    tab.look("document.getElementById('settings-open').click()")
    tab.look("document.querySelector('#settings details').open = true")
    for name, value in fields.items():
        if isinstance(value, bool):
            tab.look(f"document.getElementById('{name}').checked !== {str(value).lower()} && {name}.click()")
        else:
            tab.write(name, str(value))
    tab.press("Escape")


def send(tab: Tab, prompt: str, **fields: Any) -> None:
    """Fill in the settings, type a prompt, and press Enter."""
    if fields:
        fill(tab, **fields)
    tab.write("prompt", prompt)
    tab.press("Enter")


def answered(tab: Tab, prompt: str, **fields: Any) -> None:
    """Send, and wait until the answer has ended."""
    send(tab, prompt, **fields)
    tab.wait(ENDED)


def enter_key(tab: Tab) -> None:
    """Enter the key, leave its field, and wait until the page shows the model."""
    fill(tab, key=KEY)
    tab.wait("document.getElementById('model').textContent.includes('drafts: ')")


def do(tab: Tab, label: str, at: str = LAST) -> None:
    """Press a button of an exchange by its label."""
    tab.look(f"[...document.querySelectorAll('{at} button')].find(e => e.textContent === {label!r}).click()")
