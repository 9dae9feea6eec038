"""The form and its keys, sizes and themes, and what is told when something is wrong."""

import json
import urllib.request

import pytest

from tests.server.live import Live, total
from tests.server.web.devtools import Tab
from tests.server.web.reading import DONE, KEY, enter_key, is_shown, pieces, said, send


def test_keys_alone_reach_everything(tab: Tab) -> None:
    tab.open(tab.look("location.href"))  # where nothing has been touched yet
    reached = []
    for _ in range(30):
        tab.press("Tab")
        style = "getComputedStyle(document.activeElement)"
        near = "getComputedStyle(document.activeElement.nextElementSibling ?? document.activeElement)"
        name, outlined = tab.look(
            "[document.activeElement.id || document.activeElement.className,"
            f" {style}.outlineStyle !== 'none' || {near}.outlineStyle !== 'none']"
        )
        reached.append(name)
        assert outlined, name
        if name == "text":
            break
    wanted = [
        "theme",
        "completion",
        "prompt",
        "examples",
        "send",
        "compare",
        "speculate",
        "max_tokens",
        "key",
    ]
    assert [name for name in reached if name in {*wanted, "text"}] == [*wanted, "text"]
    assert (
        tab.look(
            "[...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length).length"
        )
        == 0
    )
    tab.write("prompt", "import os\n")
    enter_key(tab)
    tab.look("document.getElementById('ignore_eos').checked = true")
    send(tab, max_tokens=3000)
    tab.wait("document.querySelectorAll('#first .from').length > 5")
    assert tab.look("document.getElementById('send').disabled")
    tab.look("document.getElementById('stop').focus()")
    tab.press("Escape")
    tab.wait("document.getElementById('status').textContent.startsWith('Stopped after')")
    assert tab.look("document.activeElement.id") == "send"
    assert not is_shown(tab, "trouble") and not tab.look("document.getElementById('send').disabled")
    tab.look("document.querySelector('#first .text').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    note = tab.look("document.querySelector('#first .note').textContent")
    text, origin = pieces(tab)[1]
    assert note.startswith(f"{json.dumps(text, ensure_ascii=False)}: ")
    assert ("verifier" in note) if origin == 0 else (f"depth {origin}" in note)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_page_whole_and_the_theme_can_be_changed(tab: Tab, scheme: str) -> None:
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}
    background = "getComputedStyle(document.body).backgroundColor"
    tab.show(360, 800, scheme=scheme)
    assert tab.look("document.documentElement.scrollWidth") == 360
    assert tab.look(background) == paper[scheme]
    for name in ("light", "dark", "system"):
        tab.click("theme")
        assert said(tab, "theme") == f"Theme: {name}"
        assert tab.look(background) == paper.get(name, paper[scheme])
    send(tab, "import os\n", max_tokens=4)
    tab.wait(DONE)
    top = "document.getElementById('answer').getBoundingClientRect().top"
    assert tab.look(f"Math.abs({top}) < 2") and tab.look("document.documentElement.scrollWidth") == 360
    bottoms = "[...document.querySelectorAll('#first dd')].map(e => e.getBoundingClientRect().bottom)"
    assert tab.look(f"new Set({bottoms}).size") == 2  # the figures are a table, not one row after another


def test_mistakes_are_told_in_plain_words(tab: Tab) -> None:
    at_fault = (
        "[...document.querySelectorAll('[aria-invalid]')].map(e => e.id).join() + document.activeElement.id"
    )
    send(tab, "  \n")
    assert said(tab, "trouble") == "Write a prompt first." and tab.look(at_fault) == "promptprompt"
    send(tab, "x", temperature=-1)
    tab.wait("!document.getElementById('trouble').hidden && window.heard.length === 1")
    tab.wait(f"({at_fault}) === 'temperaturetemperature'")
    assert "temperature cannot be -1" in said(tab, "trouble")
    send(tab, "x", temperature=0, seed=1.5)
    assert said(tab, "trouble") == "Seed must be a whole number."
    send(tab, "x", seed=1, key="wrong")
    tab.wait(f"({at_fault}) === 'keykey'")
    assert "wants a key" in said(tab, "trouble") and "wants a key" in said(tab, "model")
    tab.write("key", KEY)
    send(tab, max_tokens=4)
    tab.wait(DONE)
    assert not is_shown(tab, "trouble") and tab.look("document.querySelector('[aria-invalid]')") is None


def test_a_server_that_is_busy_or_gone(browser: Tab) -> None:
    body = {"prompt": "import os\n", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with Live("--draft", "none", "--max-queued", "1") as live:
        browser.open(f"{live.url}/")
        browser.write("max_tokens", "3900")
        browser.look("document.getElementById('ignore_eos').checked = true")
        asked = urllib.request.Request(f"{live.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(asked):
            send(browser)
            browser.wait("!document.getElementById('trouble').hidden")
            assert said(browser, "trouble") == "The server is busy. Try again in 1 s."
        while total(live.metrics(), "vllm:num_requests_running"):
            pass
        send(browser)
        browser.wait("document.querySelectorAll('#first .from').length > 5")
        live.process.kill()
        browser.wait("!document.getElementById('trouble').hidden")
        assert "broke off" in said(browser, "trouble") and len(pieces(browser)) > 5
        send(browser)
        browser.wait("document.getElementById('trouble').textContent.includes('cannot be reached')")
        assert not browser.look("document.getElementById('send').disabled")
