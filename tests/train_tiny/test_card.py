"""The model card's plot."""

import json
from pathlib import Path
from xml.etree import ElementTree

from tools.train_tiny.card import STAGES, _curve


def test_the_loss_of_each_stage_is_plotted(tmp_path: Path) -> None:
    for name in ("trunk", "mtp", "eagle"):
        lines = [{"tokens": 1e6 * i, "loss": 8 / (i + 1)} for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curve = _curve(tmp_path)
    words = "".join(ElementTree.fromstring(curve).itertext())
    assert all(STAGES[name] in words for name in ("trunk", "mtp", "eagle"))
    assert curve == _curve(tmp_path)
