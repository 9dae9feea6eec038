"""The NIXL carrier: an agent that reads other agents' memory over any transport UCX finds.

Over TCP the peer's process sends the bytes. If the reader dies or deletes its agent meanwhile, UCX (as of
NIXL 1.5.1) may abort that process with "unexpected error: Endpoint timeout", mostly if it was stopped or
starved. A supervisor restarts it.
"""

import contextlib
import gc
import importlib
import importlib.util
import logging
import uuid
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import ConfigError
from specdec.reach.carrier_thread import CLOSE_S, CarrierThread, Quarantine
from specdec.reach.descriptors import PIECE_BYTES
from specdec.reach.wire import PeerLost, TransferUncertain, WireError
from specdec.state_slots.arena import Arena

AGENT_SLEEP_US = 10_000
"""It wakes on events, and at least this often: some transports do not notify."""
INSTALL = "install the extra: pip install 'specdec[reach]' (Linux, x86-64 or ARM)"


class Nixl(CarrierThread):
    """Reads from the arenas of other processes and machines."""

    def __init__(
        self,
        arena: Arena,
        *,
        quarantine: Quarantine | None = None,
        piece_bytes: int = PIECE_BYTES,
        close_s: float = CLOSE_S,
    ) -> None:
        """Register the whole arena. Raises ConfigError if NIXL is missing or has no transport."""
        super().__init__(
            "nixl",
            partial(AgentWire, load_nixl(), arena.data),
            arena.data.nbytes,
            quarantine=quarantine,
            piece_bytes=piece_bytes,
            close_s=close_s,
        )


def load_nixl() -> Any:
    """Import the NIXL build for torch's CUDA version, or the other: host memory needs neither."""
    names = ["nixl_cu12", "nixl_cu13"]
    if (torch.version.cuda or "").startswith("13"):
        names.reverse()
    name = next((name for name in names if importlib.util.find_spec(name)), None)
    if name is None:
        raise ConfigError(f"NIXL is not installed: {INSTALL}", field="reach")
    raise_exceptions = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{name}._api")
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported, {error}: {INSTALL}", field="reach") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    _route_logs()
    return api


def _route_logs() -> None:
    """Route NIXL's warnings to the process's log; by default it prints to stdout even on success."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)


def _make_agent(api: Any) -> Any:
    """Create an agent whose thread sleeps: the one `nixl_agent` creates polls and occupies a core."""
    name = f"specdec-{uuid.uuid4().hex}"
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = AGENT_SLEEP_US
    agent.agent = api.nixlBind.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


class AgentWire:
    """A NIXL agent and its registered arena."""

    def __init__(self, api: Any, data: Tensor) -> None:
        self._data = data  # bytes may arrive as long as the agent lives
        self.memory = "VRAM" if data.is_cuda else "DRAM"
        self.links: set[AgentLink] = set()
        self.pieces: set[AgentTransfer] = set()
        self.errors = api.nixlBind
        self.disconnected: set[bytes] = set()
        """Agents that NIXL has reported as disconnected, and forgotten."""
        if data.is_cuda:
            torch.cuda.set_device(data.device)  # UCX uses its thread's CUDA context
        try:
            self.agent = _make_agent(api)
            region = (data.data_ptr(), data.nbytes, data.device.index or 0, "")
            self._registered = self.agent.register_memory([region], self.memory)
            self.metadata = self.memory.encode() + self.agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot register the arena, {error!r}: see what UCX says, and UCX_NET_DEVICES",
                field="reach",
            ) from error

    def attach(self, metadata: bytes, local: NDArray[np.int64], remote: NDArray[np.int64]) -> "AgentLink":
        """Load the peer's metadata; it connects at the first read. Raises WireError."""
        memory, metadata = metadata[:4].decode("latin-1"), metadata[4:]
        if memory not in ("DRAM", "VRAM"):
            raise WireError("this is not the metadata of a NIXL carrier")
        link = AgentLink(self)
        try:
            link.name = self.agent.add_remote_agent(metadata)
            self.disconnected.discard(link.name)
            link.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, self.memory)
            link.remote = self.agent.prep_xfer_dlist(link.name, remote, memory)
        except Exception as error:
            reason = str(error)
        else:
            return link
        link.close()
        raise WireError(reason)

    def is_gone(self, name: bytes | None, error: Exception) -> bool:
        """Return whether an error means that an agent and all its transfers are lost."""
        if name and isinstance(error, self.errors.nixlRemoteDisconnectError):
            self.disconnected.add(name)
        return name in self.disconnected

    def close(self) -> None:
        """Delete the agent: releasing transfers or forgetting peers would not stop writes.

        While anything refers to it, each call raises WireError.
        """
        if self.agent is not None:
            for transfer in tuple(self.pieces):
                transfer.release()
            for link in tuple(self.links):
                link.close()
            with contextlib.suppress(Exception):
                self.agent.deregister_memory(self._registered)
            self._deleted = weakref.ref(self.agent.agent)
            self.agent = self._registered = None
        if self._deleted() is not None:
            gc.collect()
        if self._deleted() is not None:
            raise WireError("the NIXL agent is still referred to")


class AgentLink:
    """A peer's agent and both descriptor lists."""

    def __init__(self, wire: AgentWire) -> None:
        self.wire = wire
        self.name: bytes | None = None
        self.local: Any = None
        self.remote: Any = None
        wire.links.add(self)

    def post(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> "AgentTransfer":
        """Start a transfer; over shared memory the call copies. Raises WireError, PeerLost, Uncertain."""
        try:
            handle = self.wire.agent.make_prepped_xfer("READ", self.local, local, self.remote, remote)
        except Exception as error:
            kind = PeerLost if self.wire.is_gone(self.name, error) else WireError
            raise kind(str(error)) from None
        return AgentTransfer(self, handle)

    def close(self) -> None:
        """Release both lists and disconnect."""
        self.wire.links.discard(self)
        for descriptors in (self.local, self.remote):
            if descriptors is not None:
                with contextlib.suppress(Exception):
                    descriptors.release()
        self.local = self.remote = None
        if self.name is not None and all(link.name != self.name for link in self.wire.links):
            with contextlib.suppress(Exception):  # NIXL has already forgotten a lost peer
                self.wire.agent.remove_remote_agent(self.name)


class AgentTransfer:
    """A transfer's handle, which keeps the agent alive until released."""

    def __init__(self, link: AgentLink, handle: Any) -> None:
        """Start the transfer."""
        self._wire, self._name, self._handle = link.wire, link.name, handle
        self._wire.pieces.add(self)
        self._state = self._ask(self._wire.agent.transfer)

    def is_done(self) -> bool:
        """Return whether the transfer has finished. Raises PeerLost or Uncertain."""
        if self._state == "PROC":
            self._state = self._ask(self._wire.agent.check_xfer_state)
        return self._state == "DONE"

    def release(self) -> None:
        """Release the handle; a transfer in flight is cancelled if possible."""
        self._wire.pieces.discard(self)
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.release()

    def _ask(self, query: Callable[[Any], str]) -> str:
        try:
            state = query(self._handle)
        except Exception as error:
            if not self._wire.is_gone(self._name, error):
                raise TransferUncertain(str(error)) from None
            self.release()
            raise PeerLost(str(error)) from None
        if state == "ERR":
            raise TransferUncertain("NIXL reports an error")
        return state
