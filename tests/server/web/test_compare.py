"""Drafts off, a server without drafters, and both sides of a comparison."""

import json
from pathlib import Path

import pytest

from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import (
    ENDED,
    LAST,
    STREAM,
    answered,
    asked,
    figures,
    is_shown,
    pieces,
    said,
    send,
    text_of,
    words,
)

COMPARED = "document.getElementById('verdict').checkVisibility()"
ENDS = f"{LAST} .end"


def test_speculation_off_and_compared(tab: Tab) -> None:
    prompt = "class Parser:\n    def "
    answered(tab, prompt, max_tokens=40, temperature=0.7, seed=3)
    drafted = pieces(tab)
    tab.look("document.getElementById('speculate').focus()")
    tab.press(" ")
    answered(tab, prompt)
    plain, shown = pieces(tab), figures(tab)
    assert text_of(plain) == text_of(drafted) and {origin for _, origin in plain} == {0}
    assert (shown["drafted"], shown["accepted"], shown["length"]) == (0, 0, 1)
    assert words(tab, ENDS)[0].endswith("Drafts were off.") and not is_shown(tab, "#drafts")
    assert said(tab, "drafts-none") == "Nothing was drafted for the last answer."
    tab.click("compare")
    tab.wait(COMPARED)
    on, off = figures(tab, "#first"), figures(tab, "#second")
    assert on["accepted"] > off["accepted"] == 0 and on["steps"] < off["steps"] == 39
    assert text_of(pieces(tab, "#first")) == text_of(pieces(tab, "#second")) == text_of(plain)
    same, ratio = tab.look("(d => [d.same, Number(d.ratio)])(document.getElementById('verdict').dataset)")
    assert same == "true" and ratio == pytest.approx(on["rate"] / off["rate"])
    verdict = said(tab, "verdict")
    assert "The texts are equal." in verdict and f"Speedup {ratio:.2f}×" in verdict
    assert "looked up" not in verdict
    assert said(tab, "drafts-none").startswith("Compare records no draft trees")
    tops = "['verdict', 'scroll'].map(e => document.getElementById(e).getBoundingClientRect().top)"
    top, above = tab.look(tops)
    assert 0 <= top - above < 300  # in view; how many lines of text are above it depends on the fonts
    compared = [own["cache_salt"] for own in asked(tab)[-2:]]
    assert len(set(compared)) == 2 and "cache_salt" not in asked(tab)[0]
    # It belongs to this view, joins no chat, and disappears with the next question.
    for shown in (False, True):
        tab.look("document.getElementById('view').click()")
        assert is_shown(tab, "#comparison") == shown
    assert len(words(tab, ".exchange")) == 2
    answered(tab, "import os", max_tokens=4)
    assert not is_shown(tab, "#comparison")


def test_a_chat_without_a_new_message_is_compared_up_to_its_last(tab: Tab) -> None:
    """Both sides answer that message, not the answer to it, and nothing is added to the chat."""
    tab.look("document.getElementById('chat').click()")
    tab.click("compare")
    assert "Write something first" in said(tab, "notice")
    answered(tab, "Sort a list.", max_tokens=20, temperature=0.7, seed=3, system="Be brief.")
    answer = text_of(pieces(tab))
    tab.click("compare")
    tab.wait(COMPARED)
    once, *twice = asked(tab)
    assert [own["speculate"] for own in twice] == [True, False]
    assert once["messages"] == twice[0]["messages"] == twice[1]["messages"]
    assert [message["role"] for message in once["messages"]] == ["system", "user"]
    assert text_of(pieces(tab, "#first")) == text_of(pieces(tab, "#second")) == answer
    assert twice[0]["cache_salt"] != twice[1]["cache_salt"] and "looked up" not in said(tab, "verdict")
    tab.write("prompt", "And a dictionary?")
    tab.click("compare")
    tab.wait(f"window.asked.length === 5 && {COMPARED}")
    answered(tab, "And a dictionary?")
    *_, compared, sent = asked(tab)
    assert compared["messages"] == sent["messages"]
    assert compared["messages"][:-1] == [*once["messages"], {"role": "assistant", "content": answer}]
    assert compared["messages"][-1]["content"] == "And a dictionary?"


def test_a_comparison_names_the_faster_side(tab: Tab) -> None:
    """A speedup above 1 means that the side with drafts has more tokens/s."""
    verdict = """import("/web/outcome.js").then(({ verdict }) => {
      const answer = (rate) => ({ text: "x", tally: { rate, steps: 4, drafted: 4, accepted: 2 } });
      return [[90, 60], [60, 90]].map(([on, off]) => verdict(answer(on), answer(off), { drafters: ["mtp"] }));
    })"""
    faster, slower = tab.look(verdict)
    assert faster["ratio"] == 1.5 and slower["ratio"] == pytest.approx(2 / 3)
    assert faster["says"].startswith("Speedup 1.50×: 90.0 tokens/s with drafts, 60.0 without.")
    assert slower["says"].startswith("Speedup 0.67× (slower): 60.0 tokens/s with drafts, 90.0 without.")


def test_a_server_without_drafters_is_explained(fresh: Tab, hybrid: Path) -> None:
    with Live("--draft", "none", model=str(hybrid)) as live:
        info = live.ask("/server_info").json
        assert (info["chat_template"], info["writes"]) == (False, "completions")
        fresh.open(f"{live.url}/")
        assert said(fresh, "prompt-label") == "Text to continue"
        assert fresh.look("document.getElementById('speculate').disabled")
        fresh.look("document.getElementById('view').click()")
        answered(fresh, "abc", max_tokens=12)
        assert words(fresh, ENDS)[0].endswith("This server has no drafters.")
        assert not is_shown(fresh, "#drafts")
        fresh.click("compare")
        fresh.wait(COMPARED)
        verdict = said(fresh, "verdict")
        assert "This server has no drafters: both answers were generated without drafts. The" in verdict
        assert "Speedup" not in verdict and "looked" not in verdict


def test_the_draft_decision_is_shown_below_the_answer(fresh: Tab) -> None:
    with Live() as live:
        for _ in range(20):  # each shape is tried first
            live.ask("/v1/completions", {"prompt": "import os", "max_tokens": 200, "ignore_eos": True})
            if live.ask("/server_info").json["speculation"]["cost"]:
                break
        fresh.open(f"{live.url}/")
        fresh.look("document.getElementById('view').click()")
        answered(fresh, "import os", max_tokens=20)
        reason = live.ask("/server_info").json["speculation"]["reason"]
        fresh.wait(f"document.getElementById('outlook').textContent === 'Adaptive drafting: {reason}.'")


def test_steps_without_a_draft_are_explained(tab: Tab) -> None:
    """The first token is from prefill, not a step. Two tokens are one step, here without a draft."""
    answered(tab, "import os", max_tokens=1)
    assert figures(tab)["steps"] == 0 and "draft" not in words(tab, ENDS)[0]
    tab.look(STREAM)
    send(tab, "import os")
    tab.wait("window.stream")
    drafts = {"steps": 1, "accepted_tokens": 0, "drafted_tokens": 0, "acceptance_length": 1}
    metrics = {"speculative_decoding": drafts, "time_to_first_token_s": 0.1, "total_s": 0.2}
    tokens = {"text": "ab", "pieces": [["a", 0], ["b", 0]], "origins": [0, 0], "finish_reason": "length"}
    for event in ({"choices": [tokens]}, {"choices": [], "metrics": metrics}):
        tab.look(f"stream.say({json.dumps(event)})")
    tab.look("stream.end()")
    tab.wait(ENDED)
    assert words(tab, ENDS)[0].endswith("Acceptance length 1.00. No draft was worth its cost.")
