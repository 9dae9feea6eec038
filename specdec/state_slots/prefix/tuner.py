"""Tune the weight of saved work against recency in eviction, by simulation beside the engine.

Every candidate value has its own simulated cache, without memory, that serves the engine's requests. The
value with the most recent hits is adopted. Each simulation continues with the tree that it has shaped itself,
so nothing needs to be copied from the engine.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.cache import Tokens
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.score import Work
from specdec.state_slots.prefix.tree import Ids

logger = logging.getLogger(__name__)

GRID = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
EVERY = 64
"""Requests per simulation round."""
WINDOW = 512
"""Requests over which values are compared."""
EVIDENCE = 256
"""Requests to simulate before the value may change."""
MARGIN = 0.05
"""Relative gain in hits that another value needs, twice in a row."""
MOST_TOKENS = 1 << 24
"""Maximum tokens in the queue; further requests are dropped."""
IDLE = 9.0
"""Rest per unit of work: the thread uses at most a tenth of a core."""
COARSE = 0.02
"""Larger blocks make simulations cheaper; slabs may grow by this fraction for them."""


@dataclass(slots=True)
class Trial:
    """One value, the simulated cache that uses it, and its recent hits."""

    alpha: float
    replay: CacheReplay
    hits: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))


class Tuner:
    """Records requests from any thread, simulates them in one, and selects the best `alpha`.

    Call `tune` directly, or `start` a thread that does until `close`.
    """

    def __init__(
        self,
        layout: Layout,
        num_bytes: int,
        work: Work,
        *,
        has_head: bool = False,
        grid: Sequence[float] = GRID,
        on_change: Callable[[float], object] = lambda _: None,
    ) -> None:
        coarse_layout = coarse(layout)
        self.alpha = self._rival = grid[0]
        self.on_change = on_change
        """Called in the tuning thread with a new value."""
        self.left_out = 0
        """Requests dropped because the queue was full."""
        self.trials = [
            Trial(alpha, CacheReplay(coarse_layout, num_bytes, work, alpha=alpha, has_head=has_head))
            for alpha in grid
        ]
        self._waiting: deque[tuple[Ids, Ids, Tenant]] = deque()
        self._tokens = 0
        self._changed = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None

    def observe(self, prompt: Tokens, output: Tokens, tenant: Tenant = SOLE) -> None:
        """Queue a finished request. This only copies its tokens."""
        prompt_ids = np.array(prompt, np.int32)
        ids = np.concatenate([prompt_ids, np.asarray(output, np.int32)])
        with self._changed:
            if self._ends or self._tokens + len(ids) > MOST_TOKENS:
                self.left_out += 1
                return
            self._waiting.append((prompt_ids, ids, tenant))
            self._tokens += len(ids)
            if len(self._waiting) >= EVERY:
                self._changed.notify()

    @property
    def is_due(self) -> bool:
        return len(self._waiting) >= EVERY

    def start(self) -> None:
        """Start a thread that tunes whenever requests are queued."""
        if self._thread is None and not self._ends:
            self._thread = threading.Thread(target=self._run, name="specdec-prefix-tuner", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread within one simulated request; a second call does nothing."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self.is_due)
            if self._ends:
                return
            try:
                self.tune(_Rest(self._pause))
            except Exception:
                logger.exception("prefix_policy: tuning has failed; alpha stays %g", self.alpha)
                with self._changed:
                    self._ends = True
                    self._waiting.clear()
                return

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends, seconds)

    def tune(self, pause: Callable[[], None] = lambda: None) -> float:
        """Simulate the oldest queued requests with every value; adopt a clearly better one."""
        with self._changed:
            batch = [self._waiting.popleft() for _ in range(min(EVERY, len(self._waiting)))]
            self._tokens -= sum(len(ids) for _, ids, _ in batch)
        for request in batch:
            for trial in self.trials:
                if self._ends:
                    return self.alpha
                trial.hits.append(trial.replay.serve(*request))
                pause()
        self._choose()
        return self.alpha

    def _choose(self) -> None:
        hits = {trial.alpha: sum(trial.hits) for trial in self.trials}
        if len(self.trials[0].hits) < EVIDENCE:
            return
        best = max(hits, key=lambda alpha: hits[alpha])
        rival = best if hits[best] > hits[self.alpha] * (1 + MARGIN) else self.alpha
        if rival == self._rival != self.alpha:
            self.alpha = rival
            self.on_change(rival)
        self._rival = rival


class _Rest:
    """Rests after each piece of work in proportion to it."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self.pause = pause
        self._since_s = time.thread_time()

    def __call__(self) -> None:
        self.pause(IDLE * (time.thread_time() - self._since_s))
        self._since_s = time.thread_time()


def coarse(layout: Layout) -> Layout:
    """Return a layout with larger blocks if the slab hardly grows: trees then have fewer entries."""
    best = layout
    for times in (2, 4, 8):
        wider = replace(layout, block_tokens=times * layout.block_tokens)
        if layout.states and layout.kv and wider.slab_bytes <= (1 + COARSE) * layout.slab_bytes:
            best = wider
    return best
