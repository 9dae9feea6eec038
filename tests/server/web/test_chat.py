"""Chats: sending, editing, regenerating, storage, and the page's initial mode."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.cli.chat.conversation import load_messages
from specdec.config.sampling import SamplingParams
from specdec.models.folder import SHIPPED
from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import (
    ENDED,
    KEY,
    LAST,
    STREAM,
    answered,
    asked,
    do,
    enter_key,
    fill,
    heard,
    is_shown,
    said,
    send,
    words,
)

CHATS = "document.getElementById('chat').checked"
PROSE = f"{LAST} .prose"


def test_a_chat_goes_on(chat: Tab) -> None:
    """Enter sends, Shift+Enter adds a line, and during composition neither happens."""
    fill(chat, max_tokens=12, temperature=0, system="Be brief.")
    chat.write("prompt", "Sort")
    chat.press("Enter", "shift")
    chat.call("Input.insertText", text="a list.")
    compose = (
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    )
    assert chat.look(f"document.getElementById('prompt').dispatchEvent({compose})")
    assert asked(chat) == [] and chat.look("document.getElementById('prompt').value") == "Sort\na list."
    chat.press("Enter")
    chat.wait(ENDED)
    answered(chat, "And a dictionary?")
    first, second = asked(chat)
    one, other = words(chat, ".prose")
    system, question = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sort\na list."},
    )
    assert first["messages"] == [system, question]
    answer = second["messages"][2]["content"]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And a dictionary?"},
    ]
    assert words(chat, ".bubble") == ["Sort\na list.", "And a dictionary?"]
    kept = "JSON.parse(Object.entries(localStorage).find(([own]) => own.startsWith('specdec.chat.'))[1])"
    texts = chat.look(f"{kept}.exchanges.map((own) => own.answer.text)")
    assert texts == [answer, "".join(c["delta"]["content"] for e in heard(chat) for c in e["choices"])]
    assert one and other and "12 tokens" in words(chat, f"{LAST} .end")[0]
    assert "temperature" in first and "seed" not in first and "return_drafts" not in first

    # It is still there after a reload, and continues.
    chat.look("document.getElementById('view').click()")
    chat.reload()
    assert chat.look("document.getElementById('view').checked && document.body.dataset.view") == "tokens"
    chat.look("document.getElementById('view').click()")
    assert words(chat, ".prose") == [one, other] and words(chat, "#chats .open") == ["Sort a list."]
    enter_key(chat)
    chat.complaints.clear()  # about the key missing from the first request
    chat.click("anew")
    assert words(chat, ".prose") == [] and chat.look("location.hash") == ""
    chat.look("document.querySelector('#chats .open').click()")
    assert words(chat, ".prose") == [one, other] and chat.look(CHATS)
    assert chat.look("[temperature.value, system.value, key.value]") == ["0", "Be brief.", KEY]
    chat.look(STREAM)
    do(chat, "Regenerate")
    chat.wait("window.asked.length === 1")
    assert asked(chat)[0]["messages"] == second["messages"]
    chat.look("stream.say({choices: [{delta: {content: 'new'}, finish_reason: 'stop'}]}); stream.end()")
    chat.wait(ENDED)
    assert words(chat, ".prose") == [one, "new"]

    # An edited question drops what follows it.
    do(chat, "Edit", ".exchange:first-child")
    assert chat.look("document.activeElement.value") == "Sort\na list."
    chat.call("Input.insertText", text=" Please.")
    chat.press("Enter")
    chat.wait("window.asked.length === 2")
    chat.look("stream.say({choices: [{delta: {content: 'done'}, finish_reason: 'stop'}]}); stream.end()")
    chat.wait(ENDED)
    assert words(chat, ".bubble") == ["Sort\na list. Please."] and words(chat, ".prose") == ["done"]
    assert [own["content"] for own in asked(chat)[1]["messages"]] == ["Be brief.", "Sort\na list. Please."]

    # Deleting removes it from the storage, and can be undone.
    kept = "Object.keys(localStorage).filter((own) => own.startsWith('specdec.chat.')).length"
    chat.look("document.querySelector('#chats [aria-label^=Delete]').click()")
    assert (chat.look(kept), words(chat, ".bubble"), words(chat, "#chats .open")) == (0, [], [])
    chat.look("document.querySelector('#notice button').click()")
    assert words(chat, ".prose") == ["done"] and chat.look(kept) == 1
    assert chat.complaints == []


def test_stopping_keeps_the_text_so_far(chat: Tab) -> None:
    send(chat, "Sort a list.", max_tokens=3000, ignore_eos=True)
    chat.wait(f"document.querySelector('{PROSE}')?.textContent.length > 40")
    assert not is_shown(chat, "#send") and is_shown(chat, "#stop")
    chat.press("Escape")
    chat.wait(ENDED)
    text = words(chat, PROSE)[0]
    assert "Stopped." in words(chat, f"{LAST} .end")[0] and not is_shown(chat, ".trouble")
    chat.reload()
    assert words(chat, PROSE) == [text] and len(text) > 40


def test_finished_thinking_is_folded(chat: Tab) -> None:
    chat.look(STREAM)
    send(chat, "Sort a list.")
    chat.wait("window.stream")
    chat.look("stream.say({choices: [{delta: {reasoning_content: 'A slice '}}]})")
    chat.wait("document.querySelector('.thinking').open")
    assert words(chat, ".thinking summary") == ["Thinking …"]
    chat.look(
        "stream.say({choices: [{delta: {reasoning: 'will do.'}}]}, {choices: [{delta: {content: 'Yes'}}]})"
    )
    chat.wait("!document.querySelector('.thinking').open")
    assert words(chat, ".thoughts") == ["A slice will do."] and words(chat, PROSE) == ["Yes"]
    assert words(chat, ".thinking summary")[0].startswith("Thought for ")
    # Text typed meanwhile stays in the input.
    chat.write("prompt", "And a dict")
    chat.look("stream.say({choices: [{delta: {}, finish_reason: 'length'}]}); stream.end()")
    chat.wait(ENDED)
    assert chat.look("document.getElementById('prompt').value") == "And a dict"
    assert words(chat, f"{LAST} .end")[0].startswith("Cut off by max tokens.")
    do(chat, "Continue")
    chat.wait("window.asked.length === 2")
    assert [own["content"] for own in asked(chat)[1]["messages"]] == ["Sort a list.", "Yes", "Continue."]


HOSTILE = """<img src=x onerror="window.hurt=1"><script>window.hurt=2</script>

<iframe src="https://elsewhere.example/"></iframe>

[a](javascript:window.hurt=3) [b](data:text/html,x) [c](/flush_cache)

![pixel](https://elsewhere.example/p.png) [good](https://elsewhere.example/a "t")
<b onclick=x>bold</b> &lt;&#33;

| a | b |
|---|---|
| <br> | `c` |

- [x] one
  1. *two* **three** ~~four~~

> said

```python
x = "<b>"
"""


def test_markdown_is_shown_and_can_do_nothing(chat: Tab, live: Live) -> None:
    """In pieces of odd sizes; unclosed markup is shown as far as it goes, and all is harmless."""
    chat.look(STREAM)
    chat.requests.clear()
    send(chat, "Sort a list.")
    chat.wait("window.stream")
    events = [{"choices": [{"delta": {"content": HOSTILE[at : at + 7]}}]} for at in range(0, len(HOSTILE), 7)]
    for part in (events[:20], events[20:]):
        chat.look(f"stream.say(...{json.dumps(part)})")
    chat.wait("document.querySelector('.code code')?.textContent === 'x = \"<b>\"'")
    chat.look("stream.end()")
    chat.wait(ENDED)
    made = chat.look(
        "[...new Set([...document.querySelectorAll('.prose *')].map(e => e.localName))].sort().join(' ')"
    )
    assert made == (
        "a blockquote br button code del div em figcaption figure li ol p pre span strong table tbody td th "
        "thead tr ul"
    )
    assert chat.look(
        "[...document.querySelectorAll('.prose a')].map(e => [e.textContent, e.href, e.rel])"
    ) == [
        ["pixel", "https://elsewhere.example/p.png", "noopener noreferrer nofollow"],
        ["good", "https://elsewhere.example/a", "noopener noreferrer nofollow"],
    ]
    text = words(chat, PROSE)[0]
    for own in (
        '<img src=x onerror="window.hurt=1">',
        "[a](javascript:window.hurt=3)",
        "[c](/flush_cache)",
        "<!",
        "☑ one",
    ):
        assert own in text
    assert chat.look("window.hurt === undefined") and all(url.startswith(live.url) for url in chat.requests)
    assert chat.complaints == []
    # Selecting and copying gives the text without button labels.
    chat.look("getSelection().selectAllChildren(document.querySelector('.prose'))")
    selected = chat.look("getSelection().toString()")
    assert 'x = "<b>"' in selected and "☑ one" in selected and "Copy" not in selected
    # In addition, the page is not allowed to parse text as HTML at all.
    refused = "(() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } })()"
    assert chat.look(refused) == "TypeError"
    copies = """(async () => {
      let found;
      navigator.clipboard.writeText = async (text) => { found = text; };
      document.querySelector('.code button').click();
      await 0;
      return found;
    })()"""
    assert chat.look(copies) == 'x = "<b>"'


def test_the_page_follows_the_text_until_the_reader_scrolls_up(chat: Tab) -> None:
    chat.show(390, 700)
    chat.look(STREAM)
    send(chat, "Sort a list.")
    chat.wait("window.stream")
    rest = "(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.getElementById('scroll'))"
    more = "stream.say({choices: [{delta: {content: 'word '.repeat(400) + '\\n\\n'}}]})"
    chat.look(more)
    chat.wait(f"document.getElementById('scroll').scrollTop > 100 && {rest} < 2")
    chat.look("document.getElementById('scroll').scrollTop -= 9")  # like the start of a wheel scroll
    chat.look(more)
    chat.wait("!document.getElementById('to-end').hidden")
    chat.look(more)
    chat.wait(f"{rest} > 500")
    chat.click("to-end")
    chat.wait(f"{rest} < 2 && document.getElementById('to-end').hidden")
    chat.look(more)
    chat.wait(f"document.querySelector('{PROSE}').textContent.length > 5900 && {rest} < 2")
    assert chat.look("document.documentElement.scrollWidth") == 390


def test_the_history_is_bounded_and_evicted_if_storage_is_full(chat: Tab) -> None:
    old = {"mode": "chat", "exchanges": [{"question": "x" * 200_000, "answer": None}]}
    chat.look(
        f"""for (let i = 0; i < 9; i += 1) localStorage.setItem(`specdec.chat.${{i}}`,
          JSON.stringify({{ ...{json.dumps(old)}, id: `${{i}}`, title: `old ${{i}}`, updated: i }}))"""
    )
    chat.look("localStorage.setItem('specdec.chat.bad', '{')")
    chat.look(STREAM)
    answer = (
        "stream.say({choices: [{delta: {content: 'y'.repeat(%d)}, finish_reason: 'stop'}]}); stream.end()"
    )

    def ask(question: str, length: int) -> None:
        chat.look("window.stream = null")
        send(chat, question)
        chat.wait("window.stream")
        chat.look(answer % length)
        chat.wait(ENDED)

    ask("big", 500_000)  # two million characters in total
    assert words(chat, "#chats .open") == ["big", *(f"old {i}" for i in range(8, 1, -1))]
    assert "Deleted the 2 oldest conversations to make room" in said(chat, "notice")
    # The browser's own quota is smaller.
    chat.look(
        """(() => {
          const real = Storage.prototype.setItem;
          Storage.prototype.setItem = function (name, value) {
            const isFull = value.length > 700000 || Object.keys(this).length > 5;
            if (isFull) throw new DOMException("full", "QuotaExceededError");
            return real.call(this, name, value);
          };
        })()"""
    )
    ask("bigger", 100_000)
    listed = words(chat, "#chats .open")
    assert listed[0] == "big" and 1 < len(listed) < 6
    ask("too big", 300_000)
    assert "storage is full" in said(chat, "notice") and words(chat, ".bubble")[-1] == "too big"
    assert words(chat, "#chats .open") == listed  # chats evicted in vain are restored


ELSEWHERE = """(change => {
  const key = `specdec.chat.${location.hash.slice(1)}`;
  const kept = change(JSON.parse(localStorage[key]));
  if (kept) localStorage[key] = JSON.stringify(kept);
  else delete localStorage[key];
  dispatchEvent(new StorageEvent("storage", { key }));
})"""
"""Does to the current conversation what another tab would do."""


def test_dropped_messages_and_changes_of_another_tab_are_kept(chat: Tab) -> None:
    fill(chat, max_tokens=4, temperature=0)
    for question in ("one", "two"):
        answered(chat, question)
    do(chat, "Regenerate", ".exchange:first-child")
    chat.wait(ENDED)
    assert words(chat, ".bubble") == ["one"] and "1 later message was dropped" in said(chat, "notice")
    chat.look("document.querySelector('#notice button').click()")
    assert words(chat, ".bubble") == ["one", "two"]
    added = '{ ...own, exchanges: [...own.exchanges, { question: "three", answer: { text: "yes" } }] }'
    chat.look(f"{ELSEWHERE}(own => ({added}))")
    assert words(chat, ".bubble") == ["one", "two", "three"]
    assert words(chat, f"{LAST} .end")[0].startswith("Not finished")
    chat.look(f"{ELSEWHERE}(() => null)")
    assert words(chat, "#chats .open") == [] and "deleted in another tab" in said(chat, "notice")
    answered(chat, "four")  # a continued chat is stored again
    assert words(chat, "#chats .open") == ["one"] and len(words(chat, ".bubble")) == 4
    # A chat continued here while another tab writes becomes a separate conversation.
    fill(chat, max_tokens=3000, ignore_eos=True)
    send(chat, "five")
    chat.look(f"{ELSEWHERE}(own => ({{ ...own, title: 'theirs' }}))")
    chat.press("Escape")
    chat.wait(ENDED)
    assert sorted(words(chat, "#chats .open")) == ["one", "theirs"] and len(words(chat, ".bubble")) == 5


def test_controls_of_direction_stay_where_they_are(chat: Tab) -> None:
    """In code each is shown as its number and reverses nothing; the text and its copy are unchanged."""
    code = 'if level != "user\u202e \u2066// admin\u2069":'
    chat.look(STREAM)
    send(chat, "\u202ex")
    chat.wait("window.stream")
    content = f"\u202eCopy\n\n```\u202epy\n{code}\n```"
    chat.look(f"stream.say({json.dumps({'choices': [{'delta': {'content': content}}]})})")
    chat.look("stream.end()")
    chat.wait(ENDED)
    assert words(chat, ".code code") == [code]
    shown = (
        "[...document.querySelectorAll('.code .control')]"
        ".map(e => [e.dataset.code, getComputedStyle(e).display])"
    )
    assert chat.look(shown) == [[own, "inline-block"] for own in ("U+202E", "U+202E", "U+2066", "U+2069")]
    isolated = (
        "[...document.querySelectorAll('.bubble, .prose p, .open')].map(e => getComputedStyle(e).unicodeBidi)"
    )
    assert chat.look(isolated) == ["plaintext"] * 3
    chat.look("document.getElementById('view').click()")
    assert words(chat, ".answer .text") == [content] and len(words(chat, ".answer .text .control")) == 5


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serve a model with a chat template, not known as a completion model, under two names."""
    folder = tmp_path_factory.mktemp("chatting") / "model"
    shutil.copytree(SHIPPED["tiny"], folder)
    names = ("--served-model-name", "one", "--served-model-name", "two")
    with Live("--draft", "none", "--api-key", KEY, *names, model=str(folder)) as own:
        yield own


def test_the_page_opens_in_the_models_mode(fresh: Tab, chatting: Live, live: Live) -> None:
    """The model is known once the key is entered; a mode chosen before stays."""
    fresh.open(f"{chatting.url}/")
    assert said(fresh, "model") == "This server requires an API key." and is_shown(fresh, "#key-wanted")
    fresh.click("key-wanted")
    assert fresh.look("document.activeElement.id") == "key"
    fresh.press("Escape")
    fresh.look("document.getElementById('completion').focus()")
    fresh.press(" ")
    enter_key(fresh)
    assert not fresh.look(CHATS)
    fresh.open(f"{chatting.url}/")
    enter_key(fresh)
    assert fresh.look(CHATS) and said(fresh, "prompt-label") == "Message"
    fresh.look(
        "(e => { e.value = 'two'; e.dispatchEvent(new Event('change')); })(document.getElementById('models'))"
    )
    fresh.wait("document.getElementById('model').textContent.startsWith('warm · bfloat16 on cpu')")
    fresh.look(STREAM)
    send(fresh, "x")
    fresh.wait("window.stream")
    assert asked(fresh)[0]["model"] == "two"
    # The shipped model has a chat template, but was trained on code alone.
    fresh.open(f"{live.url}/")
    enter_key(fresh)
    assert live.ask("/server_info", Authorization=f"Bearer {KEY}").json["chat_template"]
    assert not fresh.look(CHATS) and said(fresh, "prompt-label") == "Text to continue"
    assert not is_shown(fresh, "#models")
    fresh.look("document.getElementById('chat').click()")
    assert "is not trained for chat" in said(fresh, "welcome-says")
    answered(fresh, "x", max_tokens="")
    assert "is not trained for chat" in said(fresh, "mode-says")
    assert fresh.look("document.getElementById('max_tokens').placeholder") == "256"


def test_a_completion_is_continued_where_it_was_cut(tab: Tab) -> None:
    answered(tab, "def walk(", max_tokens=6, temperature=0)
    text = words(tab, f"{LAST} .text")[0]
    assert text.startswith("def walk(") and words(tab, f"{LAST} .end")[0].startswith("Cut off by max tokens.")
    do(tab, "Continue")
    tab.wait(f"window.heard.length === 2 && {ENDED}")
    assert [own["prompt"] for own in asked(tab)] == ["def walk(", text]
    longer = words(tab, f"{LAST} .text")
    assert len(longer) == 1 and longer[0].startswith(text) and len(longer[0]) > len(text)
    # Another text is continued by itself.
    answered(tab, "import os")
    assert asked(tab)[-1]["prompt"] == "import os" and len(words(tab, ".answer .text")) == 2
    # Regenerating the first leaves it there.
    do(tab, "Regenerate", ".exchange:first-child")
    tab.wait(f"window.heard.length === 4 && {ENDED}")
    assert words(tab, ".answer .text")[0] == text and words(tab, ".given") == ["def walk(", "import os"]


def test_drafts_are_switched_off_for_the_next_request(chat: Tab) -> None:
    """Also when they are not shown; the choice is stored."""
    chat.look(STREAM)
    for at, wanted in enumerate((True, False)):
        assert is_shown(chat, "#speculate") and not is_shown(chat, "#compare")
        send(chat, "Sort a list.")
        chat.wait(f"window.asked.length === {at + 1}")
        assert asked(chat)[at]["speculate"] is wanted
        chat.look("stream.end()")
        chat.wait(ENDED)
        chat.look("document.getElementById('speculate').focus()")
        chat.press(" ")
    assert chat.look("[speculate.checked, speculate.role]") == [True, "switch"]
    chat.click("speculate")
    chat.reload()
    assert chat.look("[speculate.checked, view.checked]") == [False, False]


def test_a_request_has_the_defaults_of_the_api(chat: Tab) -> None:
    chat.look(STREAM)
    send(chat, "Sort a list.")
    chat.wait("window.stream")
    sampling = {*SamplingParams.model_fields}
    assert {*asked(chat)[0]} & sampling == {"max_tokens", "speculate"}
    assert chat.look("temperature.placeholder") == f"{SamplingParams().temperature:g}"


def test_an_example_types_its_text(tab: Tab) -> None:
    for mode in ("chat", "completion"):
        tab.look(f"document.getElementById('{mode}').click()")
        labels = words(tab, ".example")
        assert len(labels) > 2 and all(is_shown(tab, f".example:nth-child({i + 1})") for i in range(3))
        for at, label in enumerate(labels):
            tab.look(f"document.querySelectorAll('.example')[{at}].click()")
            typed = tab.look("document.getElementById('prompt').value")
            first, *more = typed.split("\n")
            assert (
                label == (f"{first} …" if more else first)
                and tab.look("document.activeElement.id") == "prompt"
            )
    assert "def fib(n):" in labels


def manage(tab: Tab, do: str, title: str | None = None) -> None:
    """Open a conversation's dialog, enter a title, and press a button."""
    tab.look("document.querySelector('#chats [aria-label^=Rename]').focus()")
    tab.press("Enter")
    assert tab.look("document.activeElement.id") == "title"
    if title is not None:
        tab.look(f"document.getElementById('title').value = {json.dumps(title)}")
    tab.look(f"document.querySelector('#manage [value={do}]').click()")
    tab.wait("!document.getElementById('manage').open")


def test_a_conversation_is_renamed(chat: Tab) -> None:
    fill(chat, max_tokens=4, temperature=0)
    answered(chat, "Sort a list.")
    before = chat.look("localStorage[`specdec.chat.${location.hash.slice(1)}`]")
    manage(chat, "rename")
    assert chat.look("localStorage[`specdec.chat.${location.hash.slice(1)}`]") == before
    manage(chat, "rename", " <b>Lists</b> ")
    chat.wait("document.querySelector('#chats .open').textContent === '<b>Lists</b>'")
    assert chat.look("document.activeElement.dataset.action") == "manage"  # focus is restored
    answered(chat, "And a dictionary?")  # saved with the conversation from now on
    chat.reload()
    chat.complaints.clear()  # about the key missing from the first request
    assert words(chat, "#chats .open") == ["<b>Lists</b>"] and len(words(chat, ".bubble")) == 2
    # Escape and the close button keep the title; an empty one restores the first question.
    for leave in ("press", "click"):
        chat.look("document.querySelector('#chats [aria-label^=Rename]').click()")
        chat.write("title", "other")
        chat.press("Escape") if leave == "press" else chat.click("manage-close")
        chat.wait("!document.getElementById('manage').open")
        assert words(chat, "#chats .open") == ["<b>Lists</b>"]
    manage(chat, "rename", "")
    chat.wait("document.querySelector('#chats .open').textContent === 'Sort a list.'")
    assert chat.complaints == []


def test_a_conversation_is_exported(chat: Tab, tmp_path: Path) -> None:
    chat.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))

    def exported(kind: str, title: str | None = None) -> str:
        known = {*tmp_path.iterdir()}
        manage(chat, kind, title)
        while not (new := [own for own in {*tmp_path.iterdir()} - known if own.suffix == f".{kind}"]):
            chat.look("new Promise((go) => setTimeout(go, 20))")
        files.append(new[0].name)
        return new[0].read_text("utf-8")

    files: list[str] = []
    fill(chat, system="Be brief.")
    chat.look(STREAM)
    send(chat, "Sort a list: ünï?")
    chat.wait("window.stream")
    chat.look("stream.say({choices: [{delta: {reasoning_content: 'A slice\\nwill do.'}}]})")
    chat.look(
        "stream.say({choices: [{delta: {content: '**Yes** <b>'}, finish_reason: 'stop'}]}); stream.end()"
    )
    chat.wait(ENDED)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sort a list: ünï?"},
        {"role": "assistant", "content": "**Yes** <b>", "reasoning_content": "A slice\nwill do."},
    ]
    assert json.loads(exported("json", "My chat")) == {"title": "My chat", "messages": messages}
    assert load_messages(tmp_path / files[0]).messages == messages
    assert exported("md") == (
        "# My chat\n\n## System\n\nBe brief.\n\n## User\n\nSort a list: ünï?\n\n"
        "## Assistant\n\n> A slice\n> will do.\n\n**Yes** <b>\n"
    )
    chat.look("document.getElementById('completion').click()")
    send(chat, "x = 1\n```\n")
    chat.wait("window.asked.length === 2")
    chat.look(
        "stream.say({choices: [{text: 'y'}]}, {choices: [{text: '', finish_reason: 'stop'}]}); stream.end()"
    )
    chat.wait(ENDED)
    assert json.loads(exported("json")) == {
        "title": "x = 1 ```",
        "completions": [{"prompt": "x = 1\n```\n", "text": "y"}],
    }
    assert exported("md") == "# x = 1 ```\n\n````\nx = 1\n```\ny\n````\n"
    assert files == ["My-chat.json", "My-chat.md", "x-1.json", "x-1.md"] and chat.complaints == []
