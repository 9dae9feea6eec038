"""Request router of the Engine deployment: the ingress decides, in its own event loop."""

import asyncio

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from specdec.ray.fleet import Asked


class ExpectedTimeRouter(RequestRouter):  # type: ignore[misc]
    """Choose the replica with the least expected time to first byte."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference."""
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(asked, Asked):
            return [candidate_replicas]
        # Ray runs this in a thread of its own; loads are owned by the ingress's.
        by_name = {own.replica_id.unique_id: own for own in candidate_replicas}
        reports = {
            name: (own.replica_metadata.get("url", ""), own.routing_stats or {})
            for name, own in by_name.items()
        }
        order = asyncio.run_coroutine_threadsafe(asked.order(reports), asked.loop)
        return [[by_name[name]] for name in await asyncio.wrap_future(order)]
