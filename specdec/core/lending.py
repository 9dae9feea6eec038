"""What an engine lends to others: the memory of a prompt's beginning, which stays where it is meanwhile."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.rates import HostMark, Mark, mark
from specdec.state_slots.slots import Fixed, Kind


class Lent(Fixed):
    """One prompt's beginning: its blocks as they are read, and at the end its state.

    The engine's thread changes it and any thread may read it: what is ready stays as it is, and its bytes
    too, for as long as it is intact.
    """

    def __init__(self, length: int, on_change: Callable[["Lent"], None] | None = None) -> None:
        self.length, self.on_change = length, on_change
        """Tokens that it covers once it is whole; who hears of each change, in the engine's thread."""
        self.blocks: tuple[int, ...] = ()
        """Those whose every token has been read, at the end the last one too."""
        self.state: int | None = None
        """The slot behind the last token; None before it is whole, and in a model without states."""
        self.hidden_1D: Tensor | None = None
        """What a draft head reads next, on the host; None without one."""
        self.generations: tuple[int, ...] = ()
        """Of the blocks, and then of the state."""
        self.intact = True
        """Whether nothing has taken its memory back."""
        self.is_sound = True
        """Whether the model has made numbers of it."""
        self._published: tuple[tuple[int, Mark], ...] = ((0, HostMark()),)
        """Tokens that are ready once the device has come so far, rising."""

    @property
    def ready(self) -> int:
        """Count the tokens whose memory is written and final."""
        return next(tokens for tokens, moment in reversed(self._published) if moment.passed())

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is ready, its state too."""
        return self.ready == self.length

    def publish(self, tokens: int, moment: Mark) -> None:
        """Make this many tokens available once the device has passed a moment."""
        self._published += ((tokens, moment),)
        if self.on_change:
            self.on_change(self)

    def withdraw(self) -> None:
        """Make nothing available any more: what is lent will move, which its readers can see."""
        self._published = self._published[:1]
        self.blocks, self.generations = (), ()


class Lending:
    """Owned by the thread that owns the arena; knows all that is lent."""

    def __init__(self, arena: Arena, *, has_head: bool) -> None:
        self.arena, self.has_head = arena, has_head
        self.lent: set[Lent] = set()

    def extend(self, lent: Lent, table: Sequence[int], computed: int) -> None:
        """Lend the blocks that are full; a head's keys at a token hang on the next one."""
        size = self.arena.layout.block_tokens
        full = max(computed - self.has_head, 0) // size
        if len(lent.blocks) < full < -(-lent.length // size):
            self._share(lent, table[:full])
            lent.publish(full * size, mark(self.arena))

    def complete(self, lent: Lent, table: Sequence[int], state: int | None, hidden_1D: Tensor | None) -> None:
        """Lend the last block and the state as well: all has been read that is lent."""
        self._share(lent, table[: self.arena.layout.blocks_for(lent.length)])
        if state is not None:
            self.arena.share_state(lent, state)
            lent.state = state
            lent.generations += (self.arena.generation(Kind.STATE, state),)
        lent.hidden_1D = None if hidden_1D is None else hidden_1D.cpu()
        lent.publish(lent.length, mark(self.arena))

    def give_back(self, lent: Lent) -> None:
        """Give back what was lent; a second call does nothing."""
        lent.intact = False
        if lent in self.lent:
            self.lent.remove(lent)
            self.arena.release_owner(lent)

    def withdraw(self, lent: Lent) -> None:
        """Take back what a preempted request lends: its memory is wanted, and computed anew."""
        if lent in self.lent:
            self.lent.remove(lent)
            self.arena.release_owner(lent)
            lent.withdraw()

    def void(self) -> None:
        """Take back all that is lent, even while it is read."""
        for lent in list(self.lent):
            self.give_back(lent)

    def forget(self) -> None:
        """Forget everything, as the arena has taken all memory back."""
        for lent in self.lent:
            lent.intact = False
        self.lent.clear()

    def _share(self, lent: Lent, table: Sequence[int]) -> None:
        """Hold the blocks behind those that it has."""
        self.lent.add(lent)
        new = table[len(lent.blocks) :]
        for block in new:
            self.arena.share_block(lent, block)
        lent.generations += tuple(self.arena.generation(Kind.BLOCK, block) for block in new)
        lent.blocks += tuple(new)
