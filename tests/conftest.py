"""Session-wide fixtures: random checkpoints, and grammar processes."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from specdec.bench.random_model import write_random_checkpoint
from specdec.bench.report import cpu_model
from specdec.kernels.native import instruction_sets
from specdec.kernels.native.threads import dismiss_helpers
from specdec.models.folder import SHIPPED
from specdec.text.grammar import compiler, template
from specdec.text.grammar.template import Template
from tests.forked import FORKING
from tests.kernels import interpreter
from tests.selection import mark_products

# A background shell makes its jobs, and their children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These may be set for the user's own servers; tests' servers would require a key, or take a role.
for variable in ("SPECDEC_REACH_SECRET", "SPECDEC_API_KEY"):
    os.environ.pop(variable, None)

if not torch.cuda.is_available():
    # Before any kernel is defined: kernels are bound to the interpreter or to a GPU.
    interpreter.install()

# An example's run time depends on the machine more than on the code.
hypothesis.settings.register_profile("specdec", deadline=None)
hypothesis.settings.load_profile("specdec")

HYBRID: Mapping[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
"""Three gated delta nets and one attention layer: small, with every kind of memory."""


def pytest_report_header() -> str:
    """Describe the CPU and its kernels. Compiles missing C kernels here, once for all workers."""
    return f"CPU: {cpu_model()}, {os.cpu_count()} cores; {instruction_sets.describe()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU; mark redundant parameter products as exhaustive."""
    if not torch.cuda.is_available():
        absent = pytest.mark.skip(reason="torch finds no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(absent)
    mark_products(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, which spent 4 s and found no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Run with three torch threads, so that large operations are parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    dismiss_helpers()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a random checkpoint, cached by its arguments."""
    written: dict[str, Path] = {}

    def write(
        config: Mapping[str, Any] = HYBRID, seed: int = 0, dtype: str = "float32", **changes: Any
    ) -> Path:
        config = {**config, **changes}
        key = repr((sorted(config.items()), seed, dtype))
        if key not in written:
            folder = tmp_path_factory.mktemp("checkpoint")
            write_random_checkpoint(folder, config, seed=seed, dtype=dtype)
            written[key] = folder
        return written[key]

    return write


@pytest.fixture(scope="session")
def hybrid(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a family's small model, whose drafters partly agree with it; cached.

    Tests that modify the folder write their own.
    """
    from tests.models.agreeing import VOCAB, write_agreeing

    written: dict[tuple[str, int], Path] = {}

    def write(family: str, *, vocab: int = VOCAB) -> Path:
        if (family, vocab) not in written:
            folder = written[family, vocab] = tmp_path_factory.mktemp(family)
            write_agreeing(folder, family, vocab=vocab)
        return written[family, vocab]

    return write


@pytest.fixture(scope="session")
def folder(family_folder: Callable[..., Path]) -> Path:
    """Return the model that most whole-engine tests use."""
    return family_folder("qwen3_5")


@pytest.fixture(scope="session", autouse=True)
def _forked_grammar_processes() -> Iterator[None]:
    """Fork grammar processes from a process that has its imports loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "subprocess", FORKING)
        yield


class SharedTemplate(Template):
    """A grammar template process that survives the close of one engine, for the next ones."""

    def close(self) -> None:
        """Keep it running."""


@pytest.fixture(scope="session")
def grammar_processes() -> Iterator[dict[str, SharedTemplate]]:
    made: dict[str, SharedTemplate] = {}
    yield made
    for own in made.values():
        Template.close(own)


@pytest.fixture(scope="module")
def shared_grammar_process(
    grammar_processes: dict[str, SharedTemplate],
) -> Iterator[None]:
    """Start one grammar process per vocabulary for all engines: saves 50 ms, a thousand times."""

    def share(*setup: Any) -> Template:
        key = repr(setup)
        if key not in grammar_processes:
            grammar_processes[key] = SharedTemplate(*setup)
        return grammar_processes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "Template", share)
        yield


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Any]:
    """Return the shipped model's, while grammars have no time limits: these would end this process."""
    from llguidance import LLTokenizer  # a bare GPU machine has none

    from specdec.text.grammar import child

    text = (SHIPPED["tiny"] / "tokenizer.json").read_text("utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "Alarm", lambda _: nullcontext())
        patch.setattr(child, "LATEST_S", 0.0)
        patch.setattr(child, "PROMPT_S", 1000.0)
        yield child.Vocabulary(LLTokenizer(text, eos_token=[0]), 512, (0,))
