"""The captured GPU step on meta tensors: any access to the host raises an error.

The engine's memory is on the meta device, and kernels are recorded without running. A tensor on any other
device is the host's, and reading a meta tensor's value fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from specdec.config.engine import EngineConfig
from specdec.models.families import network
from specdec.setup import build
from specdec.setup.build import LoadedModel, build_random
from specdec.setup.settings import Resolved
from tests.kernels.dry import Blank

META = torch.device("meta")


class AsksTheHostError(AssertionError):
    """A step uses an operation that cannot be captured."""


class WithoutHost(TorchDispatchMode):
    """Raise on operations with host tensors or that read device values; count the others."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.kernels = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # composite operators are decomposed
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        _refuse_host(str(func), (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise AsksTheHostError(f"{func}: {error}") from error
        _refuse_host(str(func), result)
        self.operators[str(func)] += 1
        return result

    def launch(self, kernel: Any, *args: Any, **named: Any) -> None:
        """Record a kernel instead of running it."""
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        _refuse_host(name, (args, named))
        self.kernels[name.removeprefix("specdec.kernels.")] += 1


def _refuse_host(what: str, given: Any) -> None:
    for value in tree_leaves(given):
        if isinstance(value, Tensor) and value.device != META:
            raise AsksTheHostError(f"{what} meets a tensor of {value.device}, {tuple(value.shape)}")


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[WithoutHost]:
    """Record operators and kernels in the block."""
    watch = WithoutHost()
    with patch.context() as own, torch.inference_mode(), watch:
        own.setattr(interpreter.GridExecutor, "__call__", lambda *args, **named: watch.launch(*args, **named))
        yield watch


def make(
    patch: pytest.MonkeyPatch,
    shape: Mapping[str, Any],
    change: Callable[[Resolved], Resolved] = lambda settings: settings,
    **settings: Any,
) -> LoadedModel:
    """Build an engine of a shape on the meta device, with a GPU's steps."""
    resolve = build.resolve

    def on_meta(*args: Any, **named: Any) -> Resolved:
        return change(replace(resolve(*args, **named), device=META))

    patch.setattr(build, "resolve", on_meta)
    patch.setattr(build, "RandomWeights", Blank)
    fixed = {"device": "cpu", "kernels": "triton", "graphs": True, "adaptive": False, "prefix_cache": False}
    sizes = {"memory_bytes": 1 << 30, "max_running": 4, "max_model_len": 4096}
    config = EngineConfig(**{"dtype": "bfloat16", **fixed, **sizes, **settings})
    return build_random(network(shape), config, stored=torch.bfloat16, stored_bytes=1, seed=0)
