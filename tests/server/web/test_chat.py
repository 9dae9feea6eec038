"""Chats, and the mode that the page opens in."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.models.folder import SHIPPED
from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import DONE, KEY, enter_key, heard, pieces, said, send, text_of

CHATS = "document.getElementById('chat').checked"
HOLD = """(() => {
  const event = { choices: [{ delta: { content: "abc" }, pieces: [["abc", 0]], origins: [0] }] };
  const start = (control) => {
    const say = (data) => control.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
    say(JSON.stringify(event));
    window.finish = () => { say("[DONE]"); control.close(); };
  };
  window.fetch = async () => new Response(new ReadableStream({ start }));
})()"""
"""Answers one word, and ends when the test says so."""


def test_a_chat_goes_on(tab: Tab) -> None:
    tab.look("document.getElementById('completion').focus()")
    tab.press("ArrowRight")
    assert tab.look("document.activeElement.id") == "chat" and said(tab, "prompt-label") == "Message"
    for count, message in enumerate(("Sort a list.", "And a dictionary?"), start=1):
        send(tab, message, max_tokens=12, temperature=0)
        tab.wait(f"window.heard.length === {count} && {DONE}")
    roles = tab.look("[...document.querySelectorAll('#first .role')].map(e => e.textContent)")
    assert roles == ["user", "assistant", "user", "assistant"]
    assert text_of(pieces(tab)) == "".join(
        choice["delta"]["content"] for event in heard(tab) for choice in event["choices"]
    )


def test_a_message_that_is_begun_while_another_is_answered_is_kept(tab: Tab) -> None:
    tab.look("document.getElementById('chat').click()")
    tab.look(HOLD)
    send(tab, "Sort a list.")
    tab.wait("document.querySelectorAll('#first .from').length")
    tab.write("prompt", "And a dict")
    tab.look("window.finish()")
    tab.wait(DONE)
    assert tab.look("document.getElementById('prompt').value") == "And a dict"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serve a model with a chat template that is not known to be no chat model."""
    folder = tmp_path_factory.mktemp("chatting") / "model"
    shutil.copytree(SHIPPED["tiny"], folder)
    with Live("--draft", "none", "--api-key", KEY, model=str(folder)) as own:
        yield own


@pytest.mark.parametrize("begun", ["nothing", "a mode", "a prompt", "an example"])
def test_a_model_with_a_chat_template_is_met_by_a_chat(browser: Tab, chatting: Live, begun: str) -> None:
    """What is served is known once the key is there; what somebody has begun until then stays."""
    browser.open(f"{chatting.url}/")
    if begun == "a mode":
        browser.look("document.getElementById('completion').focus()")
        browser.press("ArrowRight")
        browser.press("ArrowLeft")
    elif begun == "a prompt":
        browser.write("prompt", "import os")
    elif begun == "an example":
        browser.look("document.getElementById('examples').focus()")
        browser.press("ArrowDown")
    assert not browser.look(CHATS)
    enter_key(browser)
    assert browser.look(CHATS) == (begun == "nothing")
    assert said(browser, "prompt-label") == ("Message" if begun == "nothing" else "Prompt")


def test_a_model_without_a_chat_template_is_met_by_a_completion(browser: Tab, hybrid: Path) -> None:
    with Live("--draft", "none", model=str(hybrid)) as live:
        info = live.ask("/server_info").json
        assert (info["chat_template"], info["writes"]) == (False, "completions")
        browser.open(f"{live.url}/")
        assert not browser.look(CHATS) and said(browser, "prompt-label") == "Prompt"


def test_the_model_that_ships_is_met_by_a_completion(browser: Tab, live: Live) -> None:
    """It has a chat template, and knows code alone."""
    browser.open(f"{live.url}/")
    enter_key(browser)
    assert live.ask("/server_info", Authorization=f"Bearer {KEY}").json["chat_template"]
    assert not browser.look(CHATS) and said(browser, "prompt-label") == "Prompt"
