import ast
import json
import platform

import pytest

from tests.selection import EXHAUSTIVE
from tools.train_tiny.corpus import Document
from tools.train_tiny.edits import KINDS, edits
from tools.train_tiny.passages import Passages
from tools.train_tiny.prompts import FOLDER, LONGEST, SHORTEST, _apart, make, make_here

SETS = ("code", "edit", "prose", "mixed")
FUNCTION = """def total(self, values, start=0):
    number = start
    for value in values:
        number = number + value
        if number > self.limit:
            raise OverflowError("the sum of all values is larger than the limit that was set")
    self.history.append((start, number))
    if not values:
        self.log("nothing was given", start)
    return number
"""


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the sets were cut from another library")
@EXHAUSTIVE
def test_shipped_prompt_sets_are_regenerated_from_the_held_out_files() -> None:
    made = make_here()
    for category in SETS:
        lines = [json.loads(line) for line in (FOLDER / f"{category}.jsonl").read_text("utf-8").splitlines()]
        expected = [{"category": category, "name": p.name, "prompt": p.text} for p in made[category]]
        assert lines == expected


@pytest.mark.parametrize("category", SETS)
def test_sets_that_ship_are_held_out_and_of_fitting_length(category: str) -> None:
    for line in (FOLDER / f"{category}.jsonl").read_text("utf-8").splitlines():
        prompt = json.loads(line)
        source = prompt["name"].rpartition(":")[0]
        assert source == "LICENSE.txt" or Document(source, "").is_held_out
        assert SHORTEST <= len(prompt["prompt"]) <= LONGEST
        assert prompt["prompt"].endswith("\n")


def test_sets_are_small() -> None:
    assert sum((FOLDER / f"{category}.jsonl").stat().st_size for category in SETS) < 300_000


def _sources() -> list[Document]:
    """Write sources with many functions, each different."""

    def module(number: int) -> str:
        functions = (
            FUNCTION.replace("total", f"total_{number}_{i}").replace("given", f"g{i}") for i in range(9)
        )
        return "\n\n".join(functions)

    return [Document(f"module{number}.py", module(number)) for number in range(12)]


def test_prompts_hold_nothing_that_training_knows() -> None:
    sources = _sources()
    free = make(sources, Passages([]))
    assert free["code"] and free["edit"]
    known = Passages([sources[0].text.replace("\n", "\r\n  ")])
    for pieces in make(sources, known).values():
        assert not any(
            piece.source == "module0.py" and piece.kind not in ("json", "ini", "table") for piece in pieces
        )
    # The mutant: with no known texts, the same prompts would appear.
    assert any(piece.source == "module0.py" for piece in free["code"])


def test_prompts_of_a_set_overlap_nowhere() -> None:
    sets = make(_sources(), Passages([]))
    for pieces in (sets["code"], sets["edit"]):
        assert len(pieces) > 20
        assert _apart(pieces) == pieces
        assert _apart([*pieces, pieces[0]]) == pieces


def test_passages_of_200_characters_are_found_at_any_position() -> None:
    text = "".join(chr(97 + i * i % 23) + chr(97 + i % 26) for i in range(500))
    known = Passages([text])
    for at in range(0, 800, 37):
        assert known.shared_with(f"before {text[at : at + 200]} after")
    assert not known.shared_with(text[:140])


def test_every_kind_of_edit_leaves_a_continuation() -> None:
    source = "\n\n".join(FUNCTION.replace("total", f"total{i}") for i in range(8))
    made = {edit.kind: edit.text for edit in edits(source, LONGEST)}
    assert set(made) == set(KINDS)
    for kind in ("rename", "docstring", "hints", "coroutine"):
        original, _, _ = made[kind].partition("\n# The same function")
        assert original == FUNCTION.replace("total", "total7")
    assert made["rename"].endswith(
        "'new_number':\n\ndef total7(self, values, start=0):\n    new_number = start\n"
    )
    assert made["hints"].endswith("def total7(self, values: object, start: object=0) -> object:\n")
    assert made["docstring"].endswith('def total7(self, values, start=0):\n    """Total7."""\n')
    assert made["coroutine"].endswith("\nasync def total7(self, values, start=0):\n")
    assert made["reorder"].endswith(
        "\n# The same functions in reverse order:\n\ndef total7(self, values, start=0):\n"
    )


def test_renamed_functions_still_parse_and_keep_their_attributes() -> None:
    source = "def f(self, node):\n" + "    node.node_name = node.first + node.second + self.other.last\n" * 8
    renamed = next(edit.text for edit in edits(source, LONGEST) if edit.kind == "rename")
    begun = renamed.rpartition(":\n\n")[2]
    assert begun == "def f(self, element):\n"
    assert ast.parse(renamed.partition("#")[0])


def test_functions_that_keep_their_indentation_are_left_alone() -> None:
    source = 'class A:\n    def f(self):\n        return """\nat the margin\n"""\n'
    assert list(edits(source, LONGEST)) == []
