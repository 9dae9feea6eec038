"""Fixtures: a server with a key, a browser, and the playground in it."""

from collections.abc import Iterator

import pytest

from tests.server.live import Live
from tests.server.web.devtools import Tab
from tests.server.web.reading import KEY, enter_key

TREES = ("--no-adaptive", "--topk", "3", "--num-steps", "4", "--num-draft-tokens", "10")
LISTEN = """(() => {
  const real = window.fetch;
  window.asked = [];
  window.heard = [];
  window.fetch = async (path, options) => {
    const answer = await real(path, options);
    if (!path.startsWith("v1/c")) return answer;
    const [one, other] = answer.body.tee();
    window.asked.push(JSON.parse(options.body));
    window.heard.push(new Response(other).text());
    return new Response(one, answer);
  };
})()"""
"""Records the page's requests and responses, so that a test can compare them with the display."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    # Texts are compared: in float32 window widths hardly ever change a token by rounding.
    with Live(*TREES, "--dtype", "float32", "--api-key", KEY) as own:
        yield own
        assert "Traceback" not in own.stop()[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with Tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def fresh(browser: Tab) -> Tab:
    """Return the browser with empty storage and no recorded requests or complaints."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.show(1280)
    browser.forget()
    return browser


@pytest.fixture
def tab(fresh: Tab, live: Live) -> Tab:
    """Open the page with the key entered, in completion mode with coloured tokens."""
    fresh.open(f"{live.url}/")
    enter_key(fresh)
    fresh.look("document.getElementById('view').click()")
    fresh.look(LISTEN)
    fresh.complaints.clear()  # the first request had no key yet
    return fresh


@pytest.fixture
def chat(tab: Tab) -> Tab:
    """Switch to chat mode, with answers as text."""
    tab.look("document.getElementById('view').click()")
    tab.look("document.getElementById('chat').click()")
    return tab
