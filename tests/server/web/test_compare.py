"""Speculation off, speculation that cannot be, and both sides of a comparison."""

from pathlib import Path

import pytest

from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import DONE, asked, figures, is_shown, pieces, said, send, text_of

COMPARED = "!document.getElementById('verdict').hidden"


def test_speculation_off_and_compared(tab: Tab) -> None:
    prompt = "class Parser:\n    def "
    send(tab, prompt, max_tokens=40, temperature=0.7, seed=3)
    tab.wait(DONE)
    drafted = pieces(tab)
    tab.look("document.getElementById('speculate').focus()")
    tab.press(" ")
    send(tab)
    tab.wait(f"window.heard.length === 2 && {DONE}")
    plain, shown = pieces(tab), figures(tab)
    assert text_of(plain) == text_of(drafted) and {origin for _, origin in plain} == {0}
    assert (shown["drafted"], shown["accepted"], shown["length"]) == (0, 0, 1)
    assert said(tab, "status").endswith("Speculation was off.") and not is_shown(tab, "drafts")
    tab.click("compare")
    tab.wait(COMPARED)
    on, off = figures(tab), figures(tab, "second")
    assert on["accepted"] > off["accepted"] == 0 and on["steps"] < off["steps"] == 39
    assert text_of(pieces(tab)) == text_of(pieces(tab, "second")) == text_of(plain)
    same, ratio = tab.look("(d => [d.same, Number(d.ratio)])(document.getElementById('verdict').dataset)")
    assert same == "true" and ratio == pytest.approx(on["rate"] / off["rate"])
    verdict = said(tab, "verdict")
    assert "The texts are equal." in verdict and f"{ratio:.2f} times as fast" in verdict
    assert "looked up" not in verdict
    compared = [own["cache_salt"] for own in asked(tab)[-2:]]
    assert len(set(compared)) == 2 and "cache_salt" not in asked(tab)[0]


def test_a_chat_without_a_new_message_is_compared_up_to_its_last(tab: Tab) -> None:
    """Both sides answer that message, not the answer to it; and nothing of it joins the chat."""
    tab.look("document.getElementById('chat').click()")
    tab.write("prompt", "")
    tab.click("compare")
    assert said(tab, "trouble") == "Write a message first."
    tab.look("document.querySelector('details').open = true")
    send(tab, "Sort a list.", max_tokens=20, temperature=0.7, seed=3, system="Be brief.")
    tab.wait(DONE)
    answer = text_of(pieces(tab))
    tab.click("compare")
    tab.wait(COMPARED)
    once, *twice = asked(tab)
    assert [own["speculate"] for own in twice] == [True, False]
    assert once["messages"] == twice[0]["messages"] == twice[1]["messages"]
    assert [message["role"] for message in once["messages"]] == ["system", "user"]
    assert text_of(pieces(tab)) == text_of(pieces(tab, "second")) == answer
    assert twice[0]["cache_salt"] != twice[1]["cache_salt"] and "looked up" not in said(tab, "verdict")
    tab.write("prompt", "And a dictionary?")
    tab.click("compare")
    tab.wait(f"{COMPARED} && window.asked.length === 5")
    send(tab)
    tab.wait(f"window.heard.length === 6 && {DONE}")
    *_, compared, sent = asked(tab)
    assert compared["messages"] == sent["messages"]
    assert compared["messages"][:-1] == [*once["messages"], {"role": "assistant", "content": answer}]
    assert compared["messages"][-1]["content"] == "And a dictionary?"


def test_a_new_chat_begins_with_one_empty_pane(tab: Tab) -> None:
    tab.look("document.getElementById('chat').click()")
    send(tab, "Sort a list.", max_tokens=4)
    tab.wait(DONE)
    tab.click("compare")
    tab.wait(COMPARED)
    assert is_shown(tab, "second") and said(tab, "first-title") == "With speculation"
    tab.click("anew")
    assert not is_shown(tab, "second") and not is_shown(tab, "verdict")
    assert said(tab, "first-title") == "Answer" and pieces(tab) == []


def test_a_server_without_drafters_says_so(browser: Tab, hybrid: Path) -> None:
    with Live("--draft", "none", model=str(hybrid)) as live:
        browser.open(f"{live.url}/")
        send(browser, "abc", max_tokens=12)
        browser.wait(DONE)
        assert said(browser, "status").endswith("This server has no drafters.")
        assert not is_shown(browser, "drafts")
        browser.click("compare")
        browser.wait(COMPARED)
        verdict = said(browser, "verdict")
        assert "equal. This server has no drafters: both were written without drafts." in verdict
        assert "times as fast" not in verdict and "looked" not in verdict


def test_what_the_server_has_decided_on_is_told_behind_the_end(browser: Tab) -> None:
    with Live() as live:
        browser.open(f"{live.url}/")
        send(browser, "import os", max_tokens=48)
        browser.wait(f"{DONE} && document.getElementById('status').textContent.includes(' Now ')")
        assert said(browser, "status").endswith(
            f" Now {live.ask('/server_info').json['speculation']['reason']}."
        )


def test_steps_without_a_draft_are_explained_where_there_were_any(tab: Tab) -> None:
    """Two tokens are one step, which has no room for a draft; one comes of the prompt."""
    send(tab, "import os", max_tokens=2)
    tab.wait(DONE)
    assert figures(tab)["steps"] == 1 and said(tab, "status").endswith("Nothing looked worth drafting.")
    send(tab, max_tokens=1)
    tab.wait(f"window.heard.length === 2 && {DONE}")
    assert figures(tab)["steps"] == 0 and "draft" not in said(tab, "status")
