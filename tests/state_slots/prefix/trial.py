"""Random requests over a small arena, next to a plain record of the prefix each of them has computed.

Every position's keys and values, every state and every hidden state contain the hash of their prefix, so each
hit can be checked token for token.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np
import torch

from specdec.config.tenant import Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.lease import PrefixLease
from specdec.state_slots.prefix.score import Score
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tree import PrefixNode, move_blocks
from specdec.state_slots.slots import Owner
from tests.state_slots.prefix.naming import TENANTS, Views, common, names, tenant_of, views, whole_of

LETTERS = 3
"""Few, so that texts often share prefixes and diverge."""
LONGEST = 44
KV = (KVShape(1, 2), KVShape(1, 2))
"""The target's layer and a head's."""
STATES = (StateShape(1, 6, 8, 2, 5),)
LAYOUTS = {
    "hybrid": Layout(KV, STATES, torch.float32, block_tokens=4),
    "attention": Layout(KV[:1], (), torch.float32, block_tokens=4),
    "attention and a head": Layout(KV, (), torch.float32, block_tokens=4),
    "recurrent": Layout((), STATES, torch.float32, block_tokens=4),
}
OTHERS = ("stranger", "neighbour")
"""Owners that do not use prefixes."""
Prefix = tuple[int, ...]


@dataclass(eq=False)
class Reader:
    """A request: its text, its number of computed tokens, and its slots."""

    number: int
    tenant: Tenant
    text: list[int]
    lease: PrefixLease
    state: int | None
    table: list[int]
    read: int
    heard: int
    """Number of tokens the head has computed; each position also needs the next token."""
    asked: int
    """Length of its prompt."""


@dataclass
class Trial:
    """Drive a cache next to a record of computed prefixes and of cached states."""

    layout: Layout
    slabs: int
    head: bool = False
    alpha: float = 0.0
    seed: int = 0
    lower_slabs: int = 0
    """Slabs of a second tier."""
    roomy: bool = False
    """No eviction is needed: every computed prefix is found again."""
    seen: set[tuple[Tenant, Prefix]] = field(default_factory=set)
    """Every prefix that any request has computed."""
    kept: set[tuple[Tenant, Prefix]] = field(default_factory=set)
    """Prefixes at whose end a state was cached, whether or not it was evicted since."""
    readers: list[Reader] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random, self._number = Random(self.seed), 0
        self.arena = Arena(self.layout, (self.slabs + 1) * self.layout.slab_bytes, torch.device("cpu"))
        self.arena.data.fill_(0xFF)  # NaN in every dtype
        score = Score(self.layout, lambda tokens: tokens + tokens**2 / 64, self.alpha)
        lower = None
        if self.lower_slabs:
            under = Arena(self.layout, (self.lower_slabs + 1) * self.layout.slab_bytes, torch.device("cpu"))
            under.data.fill_(0xFF)
            lower = Tier(under, score, has_head=self.head)
        self.cache = PrefixCache(self.arena, score, has_head=self.head, lower=lower)
        self.arena.attach_tables(self)
        self.pages, self.states = views(self.arena)

    def run(self, operations: int, *, every: int = 100) -> None:
        """Run random operations, with a full check after each hundred."""
        ways = {
            self.admit: 22,
            self.advance: 48,
            self.end: 12,
            self.preempt: 3,
            self.cut: 0.7,
            self.meddle: 6,
            self.tidy: 5,
            self.press: 0.5,
            self.flush: 0.1,
            self.fail: 0.03,
        }
        if self.roomy:
            ways = {way: weight for way, weight in ways.items() if weight > 5 and way != self.meddle}
        for step in range(1, operations + 1):
            self.random.choices(list(ways), list(ways.values()))[0]()
            if step % every == 0:
                self.prove()
        self.drain()

    def may_move(self) -> bool:
        return True

    def move_blocks(self, moved: Mapping[int, int], owners: Set[Owner]) -> None:
        """Update the readers' tables after a move of blocks, as the loop does."""
        for reader in self.readers:
            reader.table = [moved.get(block, block) for block in reader.table]
        move_blocks(moved, owners)
        self.did["moved"] += len(moved)

    def admit(self) -> None:
        """Admit a request as the scheduler does, if there is memory for its whole prompt."""
        if len(self.readers) >= 4:
            return
        tenant, text = self.random.choice(TENANTS), self._prompt()
        marks = [self.random.randrange(1, LONGEST)] if self.random.random() < 0.2 else []
        lease = self.cache.lease(text, tenant, marks)
        self._judge(lease, tenant, text, marks)
        missing = self.layout.blocks_for(len(text)) - lease.shared
        if not self.arena.can_take(blocks=missing, states=len(self.layout.states)):
            self.cache.leave(lease)
            self.did["refused"] += 1
            return
        self._number += 1
        state = self.arena.take_state(self._number) if self.layout.states else None
        hit = self.cache.lend(self._number, lease, state)
        table = list(hit.blocks)
        again = self.head and bool(self.layout.states and hit.length)
        heard = hit.length - again
        own = Reader(self._number, tenant, text, lease, state, table, hit.length, heard, len(text))
        self.did["hits"] += hit.length > 0
        self.did["tokens"] += hit.length
        if self.layout.states:
            assert hit.length == 0 or (tenant, tuple(text[: hit.length])) in self.kept
            self._check_state(state, text[: hit.length])
            if self.head and hit.length:
                assert hit.hidden_1D is not None
                assert hit.hidden_1D.tolist() == [[float(names(text[: hit.length])[-1])]]
        self._check_blocks(table, text[: hit.length], text[: heard + 1])
        if self.layout.kv and lease.store is self.cache:
            written = set(table[heard // self.layout.block_tokens :])
            assert written.isdisjoint(self.cache.tree.table(lease.node, lease.node.end)), "it is shared"
        self._take_blocks(own)
        assert len(own.table) == self.layout.blocks_for(len(text)), "what was counted is there"
        self.readers.append(own)
        if hit.fetched:
            node = self._note(own, hit.length)
            self.cache.keep_copy(node, state, hit.hidden_1D)
            self.did["fetched"] += hit.length

    def _judge(self, lease: PrefixLease, tenant: Tenant, text: Sequence[int], marks: Sequence[int]) -> None:
        """Compare a hit with the tree's content, prefix by prefix, without the tree's search."""
        most = text[:-1]
        known, held = self._longest(self.cache, tenant, most)
        if self.cache.lower:
            deeper, kept = self._longest(self.cache.lower, tenant, most)
            held = max(held, kept)
            at_most = max(known, deeper)
        else:
            at_most = known
        if self.roomy:
            own = [tuple(most[:end]) for end in range(1, len(most) + 1)]
            assert held == max((len(each) for each in own if (tenant, each) in self.kept), default=0)
            assert known == max((len(each) for each in own if (tenant, each) in self.seen), default=0)
        if self.layout.states:
            assert lease.length == held
            wanted = {at_most, *(mark for mark in marks if mark <= len(text))}
            assert list(lease.state_lengths) == sorted(stop for stop in wanted if stop > held)
        else:
            assert lease.length == max(at_most - self.head, 0)

    def _longest(self, cache: Tier, tenant: Tenant, text: Sequence[int]) -> tuple[int, int]:
        """Return the length of a text's cached prefix, and of the longest one with a state."""
        known = held = 0
        for node in cache.tree.nodes():
            whole = whole_of(node)
            if tenant_of(cache, node) == tenant:
                known = max(known, common(whole, text))
                if node.state is not None and whole == text[: node.end]:
                    held = max(held, node.end)
        return known, held

    def advance(self) -> None:
        """Run some tokens of a request, including generated ones after its prompt."""
        if not self.readers:
            return
        own = self.random.choice(self.readers)
        if own.read >= len(own.text):
            own.text += [self.random.randrange(LETTERS) for _ in range(self.random.randrange(1, 4))]
        decodes = own.read >= own.asked
        count = min(self.random.choice([1, 2, 5, 9, 30]), len(own.text) - own.read)
        if (stop := own.lease.tokens_to_next_state(own.read)) is not None:
            count = min(count, stop)
        self._take_blocks(own)
        if len(own.table) < self.layout.blocks_for(own.read + count):
            self._leave(own)
            self.did["preempted"] += 1
            return
        self._write(own, own.read + count)
        if decodes:
            return
        node = self._note(own, own.read)
        if own.read in own.lease.state_lengths:
            self.cache.keep_copy(node, own.state, self._hidden(own.text[: own.read]))
            self._remember(own, own.read, node)

    def _note(self, own: Reader, length: int) -> PrefixNode:
        node = self.cache.note(own.lease, own.text[:length], own.table)
        for end in range(1, length + 1):
            self.seen.add((own.tenant, tuple(own.text[:end])))
        assert whole_of(node) == own.text[:length] and node is own.lease.node
        assert self.cache.tree.walk(own.tenant, np.asarray(own.text[:length], np.int32)) == (node, length)
        return node

    def _remember(self, own: Reader, length: int, node: PrefixNode) -> None:
        if node.state is not None:
            self.kept.add((own.tenant, tuple(own.text[:length])))
            self.did["kept"] += 1

    def end(self) -> None:
        """End a request whose prefill is complete: its state serves later requests."""
        over = [reader for reader in self.readers if reader.read >= reader.asked]
        if not over:
            return
        own = self.random.choice(over)
        node = self._note(own, own.read)
        if own.state is not None:
            self.cache.keep(node, own.number, own.state, self._hidden(own.text[: own.read]))
            self._remember(own, own.read, node)
        self.texts = [*self.texts[-20:], own.text[:LONGEST]]
        self._leave(own)
        self.did["ended"] += 1

    def preempt(self) -> None:
        """Preempt a request at any time."""
        if self.readers:
            self._leave(self.random.choice(self.readers))

    def cut(self) -> None:
        """End a request whose values were wrong or unverified: its exclusive prefix is dropped."""
        if not self.readers:
            return
        own = self.random.choice(self.readers)
        since = self.random.choice([0, own.lease.extended_from])
        if since is not None and self.cache.tree.contains(own.lease.node):
            end = own.lease.node.end
            self.cache.cut(own.lease, since)
            for tier in (self.cache, self.cache.lower):
                told = np.asarray(own.text[:end], np.int32)
                assert tier is None or tier.tree.walk(own.tenant, told)[1] <= since
            self.did["cut"] += 1
        self._leave(own)

    def _leave(self, own: Reader) -> None:
        self.arena.release_owner(own.number)
        self.cache.leave(own.lease)
        self.readers.remove(own)

    def meddle(self) -> None:
        """Take memory for another owner, which evicts prefixes, and fill it."""
        name, arena, random = self.random.choice(OTHERS), self.arena, self.random
        if self.layout.kv and random.random() < 0.5:
            for block in arena.take_blocks(name, random.randrange(1, 12)) or ():
                for page in self.pages:
                    page[block] = np.nan
        elif self.layout.states and random.random() < 0.7:
            for state in arena.take_snapshots(name, random.randrange(1, 3)) or ():
                for part in self.states:
                    part[state] = np.nan
        elif self.layout.states:
            arena.take_records(name, random.randrange(1, 9))

    def tidy(self) -> None:
        self.arena.release_owner(self.random.choice(OTHERS))

    def press(self) -> None:
        """Request much memory, so that most prefixes are evicted."""
        blocks = self.random.randrange(1, 40) if self.layout.kv else 0
        states = self.random.randrange(4) if self.layout.states else 0
        self.arena.can_take(blocks=blocks, states=states)

    def flush(self) -> None:
        self.cache.flush()
        left = [node for node in self.cache.tree.nodes() if not any(own.locks for own in node.subtree())]
        assert left == [], "nobody goes on from these"

    def fail(self) -> None:
        """Start over, as after a failed step."""
        self.arena.forget()
        self.cache.forget()
        self.did["failed"] += 1
        self.readers.clear()
        assert not list(self.cache.tree.nodes())

    def prove(self) -> None:
        """Check every byte of the tree's prefixes, and of each request's."""
        self.cache.check(
            [reader.lease for reader in self.readers], [*OTHERS, *(r.number for r in self.readers)]
        )
        self._prove_tier(self.cache, self.pages, self.states)
        if self.cache.lower:
            self._prove_tier(self.cache.lower, *views(self.cache.lower.arena))
        for own in self.readers:
            self._check_blocks(own.table, own.text[: own.read], own.text[: own.heard + 1])
            self._check_state(own.state, own.text[: own.read])
        self.did["proofs"] += 1

    def _prove_tier(self, cache: Tier, pages: Views, states: Views) -> None:
        for node in cache.tree.nodes():
            whole, tenant = whole_of(node), tenant_of(cache, node)
            assert (tenant, tuple(whole)) in self.seen, "nobody has read this"
            self._check_blocks(cache.tree.table(node, node.end), whole, whole, pages)
            if node.state is not None:
                assert (tenant, tuple(whole)) in self.kept
                self._check_state(node.state, whole, states)

    def drain(self) -> None:
        for reader in list(self.readers):
            self._leave(reader)
        for name in OTHERS:
            self.arena.release_owner(name)
        self.prove()
        self.flush()
        usage = self.arena.usage()
        assert usage.free_slabs == usage.slabs

    def _prompt(self) -> list[int]:
        """Draw a prompt that shares a prefix of any length with a cached or running text."""
        known = [*self.texts, *(reader.text for reader in self.readers)]
        stem = self.random.choice(known) if known and self.random.random() < 0.9 else []
        cut = self.random.choice([len(stem), self.random.randrange(len(stem) + 1)])
        fresh = self.random.choice([1, 2, 3, 5, 8, 20])
        return [*stem[:cut], *(self.random.randrange(LETTERS) for _ in range(fresh))][:LONGEST]

    def _take_blocks(self, own: Reader) -> None:
        missing = self.layout.blocks_for(len(own.text)) - len(own.table)
        if missing > 0 and (blocks := self.arena.take_blocks(own.number, missing)):
            own.table += blocks

    def _write(self, own: Reader, upto: int) -> None:
        """Compute tokens: write the target's part of each, and the head's of all before the last."""
        named, size = names(own.text[:upto]), self.layout.block_tokens
        for layer, page in enumerate(self.pages):
            behind = int(self.head and layer > 0)
            at = np.arange(own.heard if behind else own.read, upto - behind)
            page[np.asarray(own.table, np.int64)[at // size], :, at % size] = named[
                at + behind, None, None, None
            ]
        own.heard = max(upto - 1, own.heard)
        own.read = upto
        for part in self.states if own.state is not None else ():
            part[own.state] = named[-1]

    def _check_blocks(
        self,
        table: Sequence[int],
        text: Sequence[int],
        heard: Sequence[int],
        pages: Views | None = None,
    ) -> None:
        """Check that each position holds its prefix's hash; a head's also covers the next token."""
        assert len(table) >= self.layout.blocks_for(len(text))
        size = self.layout.block_tokens
        for layer, page in enumerate(self.pages if pages is None else pages):
            named = names(heard)[1:] if self.head and layer else names(text)
            at = np.arange(len(named))
            found = page[np.asarray(table, np.int64)[at // size], :, at % size]
            assert (found == named[:, None, None, None]).all(), f"the blocks of {text} hold something else"

    def _check_state(self, state: int | None, text: Sequence[int], parts: Views | None = None) -> None:
        expected = names(text)[-1] if text else 0
        for part in (self.states if parts is None else parts) if state is not None else ():
            assert (part[state] == expected).all(), f"the state of {text} is another's"

    def _hidden(self, text: Sequence[int]) -> torch.Tensor | None:
        return torch.tensor([[float(names(text)[-1])]]) if self.head else None


make = {
    "hybrid": partial(Trial, LAYOUTS["hybrid"], slabs=42),
    "hybrid and a head": partial(Trial, LAYOUTS["hybrid"], slabs=42, head=True),
    "by worth": partial(Trial, LAYOUTS["hybrid"], slabs=42, alpha=2.0),
    "two tiers": partial(Trial, LAYOUTS["hybrid"], slabs=22, lower_slabs=60),
    "two tiers of attention": partial(
        Trial, LAYOUTS["attention and a head"], slabs=6, lower_slabs=8, head=True
    ),
    "attention": partial(Trial, LAYOUTS["attention"], slabs=6),
    "attention and a head": partial(Trial, LAYOUTS["attention and a head"], slabs=6, head=True),
    "recurrent": partial(Trial, LAYOUTS["recurrent"], slabs=20),
}
