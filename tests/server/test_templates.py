"""Hostile chat templates delay only their own chat."""

import shutil
import threading
from pathlib import Path

from specdec.models.folder import SHIPPED
from tests.selection import EXHAUSTIVE
from tests.server.live import Live

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@EXHAUSTIVE
def test_a_template_that_never_ends_holds_up_its_own_chat_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED["tiny"], folder)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    with Live("--draft", "none", "--drain-seconds", "1", model=str(folder)) as live:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: answers.append(live.ask("/v1/chat/completions", chat).status), daemon=True
        )
        asking.start()
        for _ in range(5):
            assert live.ask("/v1/completions", {"prompt": "a", "max_tokens": 4}).status == 200
            assert live.ask("/health").status == 200
        assert not answers
        code, said = live.stop()
        asking.join(60)
    assert answers == [503]
    assert code == 0 and "Traceback" not in said
