"""The playground: what it is served as, and what a person at a browser meets on it."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.charts.style import COLOURS
from specdec.server.page import playground
from tests.devtools import Tab
from tests.server.live import Answer, Live, total

WEB = Path(__file__).parents[2] / "specdec" / "web"
TREES = ("--no-adaptive", "--topk", "3", "--num-steps", "4", "--num-draft-tokens", "10")
KEY = "given"
HOSTILE = 'x = "<img src=x onerror=window.hurt=1>&amp;"\n\n\ndef f(x):\n'
LISTEN = """(() => {
  const real = window.fetch;
  window.heard = [];
  window.fetch = async (...asked) => {
    const answer = await real(...asked);
    if (!asked[0].startsWith("v1/")) return answer;
    const [one, other] = answer.body.tee();
    window.heard.push(new Response(other).text());
    return new Response(one, answer);
  };
})()"""
"""Keeps what the page hears, so that a test can compare it with what the page shows."""
DONE = "document.getElementById('status').textContent.startsWith('Done')"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # Texts are compared: in float32 the width of a window rounds hardly any to another one.
    with Live(*TREES, "--dtype", "float32", "--api-key", KEY) as own:
        yield own
        assert "Traceback" not in own.stop()[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with Tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, live: Live) -> Tab:
    """Open the page anew, with the key in its field."""
    browser.requests.clear()
    browser.show(1280)
    browser.open(f"{live.url}/")
    browser.write("key", KEY)
    browser.look(LISTEN)
    browser.complaints.clear()  # the first look at the server had no key yet
    return browser


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


def test_the_page_and_its_files_need_no_key_and_load_nothing_from_elsewhere(live: Live) -> None:
    page = live.ask("/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', page.data.decode())
    assert len(named) > 4
    for path in {f"/{own}" for own in named} | {f"/web/{file.name}" for file in WEB.iterdir()}:
        if path.endswith("index.html"):
            continue
        answer = live.ask(path)
        assert answer.status == 200 and answer.headers["Content-Security-Policy"] == policy, path
        assert live.ask(path, If_None_Match=answer.headers["Etag"]).status == 304
        addresses = re.findall(rb"https?://[^\s\"'`)]+", answer.data)
        assert {*addresses} <= {b"http://www.w3.org/2000/svg"}, path
    assert live.ask("/web/nothing.js").status == 401 and live.ask("/server_info").status == 401


def test_only_known_kinds_of_files_ship() -> None:
    assert set(playground()) == {"/", *(f"/web/{f.name}" for f in WEB.iterdir() if f.name != "index.html")}
    assert not any("innerHTML" in file.read_text("utf-8") for file in WEB.glob("*.js"))
    assert max(len(file.read_text("utf-8").splitlines()) for file in WEB.iterdir()) < 300


def test_the_colours_are_those_of_the_charts() -> None:
    theme = (WEB / "theme.css").read_text("utf-8")
    named = {"draft": "c0", "own": "c1"} | {name: name for name in ("paper", "ink", "muted", "rule")}
    for name, colour in named.items():
        light, dark = COLOURS[colour]
        assert f"--{name}: light-dark({light}, {dark});" in theme


def test_bodies_ask_for_no_drafts_and_for_trees(live: Live) -> None:
    fields = {"prompt": "def f(x):\n", "max_tokens": 30, "temperature": 0}
    ask = {"return_drafts": True, "return_metrics": True, "return_token_ids": True}
    for path, named in (
        ("/v1/completions", fields),
        ("/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": "x"}]}),
    ):
        one, other = (
            live.ask(path, {**named, **ask, "speculate": own}, Authorization=f"Bearer {KEY}").json
            for own in (True, False)
        )
        drafted = one["metrics"]["speculative_decoding"]["drafted_tokens"]
        trees = one["choices"][0]["drafts"]
        assert drafted == sum(len(tree["parents"]) - 1 for tree in trees) > 0
        assert other["metrics"]["speculative_decoding"]["drafted_tokens"] == 0
        assert other["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
        assert {tuple(tree["parents"]) for tree in other["choices"][0]["drafts"]} == {(-1,)}
        spelled = [
            token
            for tree in trees
            for token in (
                *(tree["token_ids"][node] for node in tree["accepted"]),
                *([tree["bonus"]["token_id"]] if tree["bonus"] else []),
            )
        ]
        assert spelled == one["choices"][0]["token_ids"][1:]
    assert (
        "drafts" not in live.ask("/v1/completions", fields, Authorization=f"Bearer {KEY}").json["choices"][0]
    )


def test_what_is_shown_is_what_was_answered(tab: Tab, live: Live) -> None:
    tab.complaints.clear()
    send(tab, HOSTILE, max_tokens=60, temperature=0.7, seed=5)
    tab.wait(DONE)
    events = heard(tab)
    drafted = events[-1]["metrics"]["speculative_decoding"]
    shown = figures(tab)
    assert shown["tokens"] == events[-1]["usage"]["completion_tokens"] == 60
    assert shown["length"] == drafted["acceptance_length"] > 1
    assert (shown["steps"], shown["drafted"]) == (drafted["steps"], drafted["drafted_tokens"])
    accepted = events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert shown["accepted"] == accepted == sum(origin > 0 for origin in choices(events, "origins")) > 0
    # A piece with a line's end within is shown in parts.
    parts = pieces(tab)
    whole = choices(events, "pieces")
    assert text_of(parts) == text_of(whole) == "".join(e["choices"][0]["text"] for e in events[:-1])
    assert [o for text, o in parts for _ in text] == [o for text, o in whole for _ in text]
    trees = choices(events, "drafts")
    assert said(tab, "step-label") == f"Step {len(trees)} of {len(trees)}"
    widest = max(range(len(trees)), key=lambda i: len(trees[i]["parents"]))
    tab.look(
        f"(s => {{ s.value = {widest + 1}; s.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('step'))"
    )
    boxes = tab.look(
        "[...document.querySelectorAll('#tree g')].map(g => [g.getAttribute('class'), g.dataset.origin])"
    )
    tree = trees[widest]
    lit = [origin for kind, origin in boxes if kind == "lit"]
    assert len(boxes) == len(tree["parents"]) + 1 and boxes[0][0] == "root"
    assert lit == [*map(str, range(1, len(tree["accepted"]) + 1)), "0"]
    # The prompt, which would be a picture in a page that took it for one, is a text.
    assert tab.look("document.querySelector('#first .text').textContent").startswith(HOSTILE)
    assert tab.look("document.querySelectorAll('main img').length") == 0 and not tab.look("window.hurt")
    assert all(url.startswith((live.url, "about:")) for url in tab.requests) and len(tab.requests) > 10
    assert tab.complaints == []


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
    tab.click("compare")
    tab.wait("!document.getElementById('verdict').hidden")
    on, off = figures(tab), figures(tab, "second")
    assert on["accepted"] > off["accepted"] == 0 and on["steps"] < off["steps"] == 39
    assert text_of(pieces(tab)) == text_of(pieces(tab, "second")) == text_of(plain)
    same, ratio = tab.look("(d => [d.same, Number(d.ratio)])(document.getElementById('verdict').dataset)")
    assert same == "true" and ratio == pytest.approx(on["rate"] / off["rate"])
    verdict = said(tab, "verdict")
    assert "The texts are equal." in verdict and f"{ratio:.2f} times as fast" in verdict
    assert "written before" in verdict


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
    tab.look("document.getElementById('ignore_eos').checked = true")
    send(tab, "import os\n", key=KEY, max_tokens=3000)
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


def test_a_long_text_is_shown_without_touching_what_stands_there(tab: Tab) -> None:
    """Ten thousand tokens, in lines and without any: nothing that was added is taken away or changed."""
    tab.look(
        """(() => {
          const word = (i) => i < 9000 && i % 12 === 11 ? "abc\\n" : "abcd ";
          const chunk = (i) => ({ choices: [{ text: word(i), pieces: [[word(i), i % 5]], origins: [i % 5],
            drafts: [{ texts: ["a", "b"], parents: [-1, 0], accepted: [1], bonus: { text: "c" } }] }] });
          let next = 0;
          const pull = (control) => {
            const some = Array.from({ length: 40 }, (_, k) => chunk(next + k))
              .map((own) => `data: ${JSON.stringify(own)}\\n\\n`);
            control.enqueue(new TextEncoder().encode(some.join("")));
            next += 40;
            if (next < 10000) return new Promise((go) => setTimeout(go, 1));
            control.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
            control.close();
          };
          const real = window.fetch;
          window.fetch = async (path, options) =>
            path.startsWith("v1/") ? new Response(new ReadableStream({ pull })) : real(path, options);
          window.taken = 0;
          window.added = 0;
          new MutationObserver((all) => {
            for (const one of all) {
              window.taken += one.removedNodes.length;
              window.added += [...one.addedNodes].filter((node) => node.className === "from").length;
            }
          }).observe(document.querySelector("#first .text"), { childList: true, subtree: true });
        })()"""
    )
    send(tab, "x")
    tab.wait(DONE)
    parts = pieces(tab)
    assert len(parts) == 10_000 and len(text_of(parts)) > 45_000
    assert tab.look("window.taken") == 0 and tab.look("window.added") <= 10_000
    assert figures(tab)["tokens"] == 10_000 and figures(tab)["steps"] == 1999
    assert tab.look("document.querySelectorAll('#curve path').length") == 1
    assert tab.look("document.querySelectorAll('#tree g').length") == 3
