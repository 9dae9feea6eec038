"""What a server lends to others and fetches from them. State holds one of these, or none."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from specdec.core.terms import Prepared
from specdec.engine.engine import SpecEngine
from specdec.reach.allowed import Allowed
from specdec.reach.carrier import Carrier
from specdec.reach.channel import Channel, channel_app
from specdec.reach.facts import facts_of
from specdec.reach.leases import Book
from specdec.reach.peers import Peers
from specdec.reach.terms import LeaseReference, Reference, RoomReference, hash_facts, new_id
from specdec.server.failures import Failure
from specdec.server.reach.bodies import Fetch
from specdec.server.reach.lender import Lender
from specdec.server.reach.role import Part
from specdec.server.settings import ServerConfig

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
RETRY = {"Retry-After": "1"}


class Reach:
    """Owned by the event loop's thread, from before the server says that it serves until it has drained."""

    @classmethod
    async def open(cls, part: Part, engine: SpecEngine, folder: Path, config: ServerConfig) -> Self:
        """Make the arena readable for others, and listen."""
