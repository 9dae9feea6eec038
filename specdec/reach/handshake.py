"""The handshake of two engines, and attaching the peer's arena."""

from collections.abc import Mapping

from specdec.errors import ConfigError
from specdec.reach.carrier import Carrier
from specdec.reach.messages import AgentInfo, AgentsResponse, pack, unpack
from specdec.reach.protocol import hash_facts
from specdec.state_slots.arena import Arena
from specdec.state_slots.transfer.model_layout import ModelLayout
from specdec.state_slots.transfer.plan import ArenaView, TransferPlan, make_plans, read_view


class ArenaHandshake:
    """One engine's arena as shown to peers. Thread-safe."""

    def __init__(self, engine: str, facts: Mapping[str, str], arena: Arena, carrier: Carrier) -> None:
        self.engine, self.facts, self.fingerprint = engine, dict(facts), hash_facts(facts)
        self._carrier = carrier
        data = arena.data
        self._view = ArenaView(
            data.data_ptr(), data.nbytes, ModelLayout.of(arena.layout), 1, 0, data.device.index or 0
        )

    def agents(self) -> AgentsResponse:
        """Return the current agent's metadata and this arena's layout."""
        info = AgentInfo(rank=0, metadata=pack(self._carrier.metadata), arena=self._view.as_json())
        return AgentsResponse(
            engine=self.engine,
            fingerprint=self.fingerprint,
            facts=self.facts,
            carrier=self._carrier.name,
            agents=[info],
        )

    def attach(self, name: str, agents: AgentsResponse) -> TransferPlan:
        """Attach a peer's arena under a name; return the plan for reading it."""
        if agents.carrier != self._carrier.name:
            raise ConfigError(
                f"role: the transport is {agents.carrier} there and {self._carrier.name} here; install "
                "the same release of specdec on both.",
                field="role",
            )
        if len(agents.agents) != 1:
            raise ConfigError(
                f"tp: transfers from {len(agents.agents)} ranks are not supported; start it with one.",
                field="tp",
            )
        (agent,) = agents.agents
        plan = make_plans(self._view, [read_view(agent.arena)])[0]
        self._carrier.attach(name, unpack(agent.metadata, "metadata"), plan)
        return plan
