"""Fixtures that close carriers after each test and restrict them to loopback."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec.reach.carrier_thread import CarrierThread
from specdec.reach.nixl import Nixl
from specdec.state_slots.arena import Arena
from tests.reach.copies import Copies

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: the extra `reach` brings it")

Make = Callable[..., CarrierThread]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def carrier_class(request: pytest.FixtureRequest) -> type[Copies] | type[Nixl]:
    """Return the carrier class for `make`; tests choose it through `indirect`."""
    return getattr(request, "param", Nixl)


@pytest.fixture
def make(carrier_class: type[Copies] | type[Nixl]) -> Iterator[Make]:
    """Return a function that makes a carrier of an arena."""
    made: list[CarrierThread] = []

    def of(arena: Arena, **options: Any) -> CarrierThread:
        made.append(carrier_class(arena, **options))
        return made[-1]

    yield of
    for carrier in made:
        carrier.close()
        assert not carrier._thread.is_alive()


each_carrier = pytest.mark.parametrize(
    "carrier_class",
    [pytest.param(Copies, id="copies"), pytest.param(Nixl, id="nixl", marks=needs_nixl)],
    indirect=True,
)
