"""The input, the settings and their keys, sizes and themes, and error messages."""

import json
import urllib.request

import pytest

from tests.server.live import Live, total
from tests.server.web.devtools import Tab
from tests.server.web.reading import (
    ENDED,
    LAST,
    answered,
    do,
    fill,
    is_shown,
    pieces,
    said,
    send,
    words,
)

TROUBLE = f"{LAST} .trouble"
AT_FAULT = (
    "[...document.querySelectorAll('[aria-invalid]')].map(e => e.id).join() + document.activeElement.id"
)


def test_keys_alone_reach_everything(tab: Tab) -> None:
    answered(tab, "import os\n", max_tokens=12)
    tab.look("document.getElementById('anew').focus()")
    reached = ["anew"]
    for _ in range(40):
        tab.press("Tab")
        own = "document.activeElement"
        style = f"getComputedStyle({own})"
        near = f"getComputedStyle({own}.nextElementSibling ?? {own})"
        frame = f"getComputedStyle({own}.closest('form') ?? {own})"
        name, outlined = tab.look(
            f"[{own}.id || {own}.className || {own}.localName, {style}.outlineStyle !== 'none' ||"
            f" {near}.outlineStyle !== 'none' || {frame}.boxShadow !== 'none']"
        )
        if name == "body":
            break
        reached.append(name)
        assert outlined, name
    wanted = [
        "anew",
        "open",
        "view",
        "settings-open",
        "text",
        "step",
        "prompt",
        "completion",
        "speculate",
        "compare",
    ]
    assert [name for name in reached if name in wanted] == wanted
    assert reached[-1] == "send" and reached.count("quiet") >= 4
    inputs = "[...document.querySelectorAll('input, textarea, select')]"
    assert tab.look(f"{inputs}.filter(e => !e.labels.length && !e.ariaLabel).length") == 0
    fill(tab, ignore_eos=True, max_tokens=3000)
    send(tab, "import os\n")
    tab.wait(f"document.querySelectorAll('{LAST} .from').length > 5")
    tab.look("document.getElementById('stop').focus()")
    tab.press(" ")
    tab.wait(ENDED)
    assert tab.look("document.activeElement.id") == "send"
    tab.look(f"document.querySelector('{LAST} .text').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    note = words(tab, f"{LAST} .note")[0]
    text, origin = pieces(tab)[1]
    assert note.startswith(f"{json.dumps(text, ensure_ascii=False)}: ")
    assert ("the model's own" in note) if origin == 0 else (f"depth {origin}" in note)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_whole_and_the_theme_can_be_changed(tab: Tab, scheme: str) -> None:
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
    background = "getComputedStyle(document.body).backgroundColor"
    tab.show(360, 800, scheme=scheme)
    assert tab.look("document.documentElement.scrollWidth") == 360
    assert tab.look(background) == paper[scheme]
    tab.click("settings-open")
    for name in ("light", "dark", "system"):
        tab.click("theme")
        assert said(tab, "theme") == f"Theme: {name}"
        assert tab.look(background) == paper.get(name, paper[scheme])
    tab.press("Escape")
    answered(tab, "import os\n", max_tokens=4)
    assert tab.look("document.documentElement.scrollWidth") == 360
    bottoms = f"[...document.querySelectorAll('{LAST} dd')].map(e => e.getBoundingClientRect().bottom)"
    assert tab.look(f"new Set({bottoms}).size") == 2  # the figures form a table
    # The list of conversations overlays the page, and is closed by Escape or a choice.
    assert not is_shown(tab, "#history")
    tab.click("history-open")
    assert is_shown(tab, "#history") and tab.look("document.activeElement.id") == "anew"
    tab.press("Escape")
    assert not is_shown(tab, "#history") and tab.look("document.activeElement.id") == "history-open"
    tab.click("history-open")
    tab.press("Enter")
    assert not is_shown(tab, "#history") and is_shown(tab, "#welcome")


def test_errors_are_plain_sentences(tab: Tab) -> None:
    send(tab, "  \n")
    assert words(tab, ".exchange") == []
    send(tab, "x", temperature=0, seed=1.5)
    tab.wait("document.getElementById('fault').textContent === 'Seed must be an integer.'")
    assert tab.look(AT_FAULT) == "seedseed"
    assert tab.look("document.getElementById('prompt').value") == "x" and words(tab, ".exchange") == []
    tab.press("Escape")
    answered(tab, "x", seed=1, temperature=-1)
    assert "temperature cannot be -1" in words(tab, TROUBLE)[0]
    do(tab, "Settings")
    assert tab.look(AT_FAULT) == "temperaturetemperature"
    tab.press("Escape")
    answered(tab, "x", temperature=0, key="wrong")
    assert "requires a valid API key" in words(tab, TROUBLE)[0] and "requires" in said(tab, "model")
    do(tab, "Settings")
    assert tab.look(AT_FAULT) == "keykey"
    tab.write("key", "given")
    tab.press("Enter")
    tab.look("document.querySelector('#max_tokens').value = 4")
    do(tab, "Retry")
    tab.wait(ENDED)
    assert not is_shown(tab, TROUBLE) and tab.look("document.querySelector('[aria-invalid]')") is None
    assert len(words(tab, ".exchange")) == 2 and len(pieces(tab)) > 0


def test_a_server_that_is_busy_or_gone(fresh: Tab) -> None:
    body = {"prompt": "import os\n", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with Live("--draft", "none", "--max-queued", "1") as live:
        fresh.open(f"{live.url}/")
        fresh.look("document.getElementById('view').click()")
        fill(fresh, max_tokens=3900, ignore_eos=True)
        wanted = urllib.request.Request(f"{live.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(wanted):
            answered(fresh, "import os\n")
            assert words(fresh, TROUBLE) == ["The server is busy. Try again in 1 s."]
        while total(live.metrics(), "vllm:num_requests_running"):
            pass
        do(fresh, "Retry")
        fresh.wait(f"document.querySelectorAll('{LAST} .from').length > 5")
        live.process.kill()
        fresh.wait(ENDED)
        assert "was lost" in words(fresh, TROUBLE)[0] and len(pieces(fresh)) > 5
        answered(fresh, "x")
        assert "cannot be reached" in words(fresh, TROUBLE)[0] and is_shown(fresh, "#send")
