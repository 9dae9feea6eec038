"""The baseline cache: a state for every block of 32 tokens, evicted least recently used first.

This is what Marconi calls vLLM+: an engine's cache of blocks, each with the state behind it. It has no slabs:
its bytes are counted and lost to no rounding, which flatters it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.tree import Ids

SIZE = 32
"""Tokens of a block."""

Key = tuple[int, bytes]
"""The number of the block before it (0: none), and a block's own tokens."""


@dataclass(slots=True, eq=False)
class Block:
    """Some tokens' keys and values, and the state behind them."""

    number: int
    key: Key
    users: int = 0


@dataclass(slots=True)
class Run:
    """What a request holds while it lives."""

    hit: int
    own_bytes: int
    """Its own state, and the keys and values that no block of the cache has."""
    blocks: list[Block]


class BlockCache:
    """Keeps unreferenced blocks until their bytes are needed; a prefix is evicted from its end."""

    def __init__(self, layout: Layout, num_bytes: int) -> None:
        self.num_bytes, self.used_bytes = num_bytes, 0
        self.token_bytes = layout.block_bytes // layout.block_tokens
        self.state_bytes = layout.state_bytes
        self._blocks: dict[Key, Block] = {}
        self._idle: OrderedDict[Key, Block] = OrderedDict()
        """Unreferenced blocks in the order of eviction: children before their parents."""
        self._made = self._alive = 0

    @property
    def states(self) -> int:
        return len(self._blocks)

    def admit(self, prompt: Ids, output: int) -> Run | None:
        """Begin a request that shares the blocks it finds; None: there is no memory for it."""
        found: list[Block] = []
        for tokens in _cut(prompt[:-1]):
            block = self._blocks.get((found[-1].number if found else 0, tokens))
            if block is None:
                break
            found.append(block)
        for block in found:
            self._use(block)
        while not self._make_room(own_bytes := self._own_bytes(len(prompt) + output, found)):
            # The blocks it hit may fill the memory: with no other request to wait for, it recomputes them.
            if self._alive or not found:
                self._let_go(found)
                return None
            self._let_go([found.pop()])
        self._alive += 1
        self.used_bytes += own_bytes
        return Run(len(found) * SIZE, own_bytes, found)

    def read(self, run: Run, ids: Ids) -> None:
        """Keep what a request has read, as far from its beginning as there is memory for states."""
        for tokens in list(_cut(ids))[len(run.blocks) :]:
            key = (run.blocks[-1].number if run.blocks else 0, tokens)
            block = self._blocks.get(key)
            if block is None:
                if not self._make_room(self.state_bytes):
                    return
                self._made += 1
                block = self._blocks[key] = Block(self._made, key)
                self.used_bytes += self.state_bytes
            else:
                self.used_bytes -= SIZE * self.token_bytes
            run.own_bytes -= SIZE * self.token_bytes
            self._use(block)
            run.blocks.append(block)

    def end(self, run: Run, whole: Ids) -> None:
        """Keep what else a request has read, and take back what it held alone."""
        self.read(run, whole[:-1])
        self._alive -= 1
        self.used_bytes -= run.own_bytes
        self._let_go(run.blocks)

    def _own_bytes(self, tokens: int, found: list[Block]) -> int:
        return self.state_bytes + (tokens - len(found) * SIZE) * self.token_bytes

    def _make_room(self, num_bytes: int) -> bool:
        while self.used_bytes + num_bytes > self.num_bytes and self._idle:
            key, _ = self._idle.popitem(last=False)
            del self._blocks[key]
            self.used_bytes -= SIZE * self.token_bytes + self.state_bytes
        return self.used_bytes + num_bytes <= self.num_bytes

    def _use(self, block: Block) -> None:
        block.users += 1
        self._idle.pop(block.key, None)

    def _let_go(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._idle[block.key] = block


def _cut(ids: Ids) -> Iterator[bytes]:
    """Yield the whole blocks of some tokens."""
    for at in range(0, len(ids) - SIZE + 1, SIZE):
        yield ids[at : at + SIZE].tobytes()
