"""`specdec` that serves requests in arrival order: `python -m tests.server.unfair serve …`.

A mutant, and the baseline for fair scheduling.
"""

import sys
from typing import Any

from specdec.cli import main
from specdec.core.fairness import FairQueue
from specdec.core.scheduler import Scheduler


def queue_all_as_one() -> None:
    """Start the oldest waiting request first, and never preempt for a share."""
    queue: Any = FairQueue
    queue.heads = lambda own, *_: sorted(own, key=lambda request: request.arrived_s)[:1]
    queue.rank = lambda own, tenant: (0.0, 0.0)
    scheduler: Any = Scheduler
    scheduler._youngest = lambda own, caller: None


if __name__ == "__main__":
    queue_all_as_one()
    sys.exit(main())
