"""An answer as tokens: the display equals the response, at any length."""

from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import (
    ENDED,
    KEY,
    LAST,
    answered,
    choices,
    figures,
    heard,
    is_shown,
    pieces,
    said,
    send,
    text_of,
)

HOSTILE = 'x = "<img src=x onerror=window.hurt=1>&amp;"\n\n\ndef f(x):\n'


def test_bodies_disable_drafts_and_request_trees(live: Live) -> None:
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


def test_the_page_shows_the_answer(tab: Tab, live: Live) -> None:
    answered(tab, HOSTILE, max_tokens=60, temperature=0.7, seed=5)
    events = heard(tab)
    drafted = events[-1]["metrics"]["speculative_decoding"]
    shown = figures(tab)
    assert shown["tokens"] == events[-1]["usage"]["completion_tokens"] == 60
    assert shown["length"] == drafted["acceptance_length"] > 1
    assert (shown["steps"], shown["drafted"]) == (drafted["steps"], drafted["drafted_tokens"])
    accepted = events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert shown["accepted"] == accepted == sum(origin > 0 for origin in choices(events, "origins")) > 0
    # A piece with a line break is shown in parts.
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
    steps = tab.look("[...document.querySelectorAll('.plot span')].map(e => e.textContent)")
    most = max(len(own["accepted"]) for own in trees)
    assert steps == ["tokens accepted", str(most), "0", "1", "verify step", str(len(trees))]
    # The prompt, which as HTML would be an image, is shown and copied as text.
    text = HOSTILE + text_of(whole)
    assert tab.look(f"document.querySelector('{LAST} .text').textContent") == text
    copied = tab.look(
        f"""(() => {{
          getSelection().selectAllChildren(document.querySelector('{LAST} .text'));
          let found;
          const hear = (own) => {{
            found = own.defaultPrevented && own.clipboardData.getData("text/plain");
          }};
          document.addEventListener("copy", hear, {{ once: true }});
          document.execCommand("copy");
          return found;
        }})()"""
    )
    assert copied == text
    assert tab.look("document.querySelectorAll('main img').length") == 0 and not tab.look("window.hurt")
    assert all(url.startswith((live.url, "about:")) for url in tab.requests) and len(tab.requests) > 10
    assert tab.complaints == []
    # Without the speculation view the text is the same, plain and without draft information.
    tab.look("document.getElementById('view').click()")
    assert tab.look(f"document.querySelector('{LAST} .text').textContent") == text
    assert not any(is_shown(tab, own) for own in ("#speculation", "#compare", ".figures"))


def test_a_long_text_is_appended_without_rewriting(tab: Tab) -> None:
    """Ten thousand tokens, with and without line breaks: added elements are never removed or changed."""
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
              if (!one.target.closest(".text")) continue;
              window.taken += one.removedNodes.length;
              window.added += [...one.addedNodes].filter((node) => node.className === "from").length;
            }
          }).observe(document.querySelector("#thread"), { childList: true, subtree: true });
        })()"""
    )
    send(tab, "x")
    tab.wait(ENDED)
    parts = pieces(tab)
    assert len(parts) == 10_000 and len(text_of(parts)) > 45_000
    assert tab.look("window.taken") == 0 and tab.look("window.added") <= 10_000
    assert figures(tab)["tokens"] == 10_000 and figures(tab)["steps"] == 1999
    assert tab.look("document.querySelectorAll('#curve path').length") == 1
    assert tab.look("document.querySelectorAll('#tree g').length") == 3
    # The page has scrolled to the end.
    rest = "(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.getElementById('scroll'))"
    tab.wait(f"{rest} < 2")
    assert not is_shown(tab, "#to-end")
