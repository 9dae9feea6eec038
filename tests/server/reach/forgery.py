"""Forged, stale, reused and foreign `kv_transfer_params`: a prompt always gets its own text.

`python -m tests.server.reach.forgery` sends 10,000 bodies to a pair of servers and prints the results.
"""

import argparse
import asyncio
import copy
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from specdec.bench.random_model import write_random_checkpoint
from tests.conftest import HYBRID
from tests.server.live import total
from tests.server.reach.routers import Pair, authorized, paired

SMALL = {**HYBRID, "num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32}
"""A gated delta net and an attention layer."""
KEYS = ("key-of-one-tenant", "key-of-another-tenant")
PROMPTS, TOKENS, ANSWER, VOCAB = 12, 66, 3, 300
"""Prompts are token ids, slightly longer than the minimum worth fetching; some forgeries alter them."""
LEASES = 2
"""Prompts prefilled by one request, whose answer holds their leases."""
BODIES = 12
"""Bodies made from one such answer."""
STATUSES = {200, 400}
Params = dict[str, Any]
Ids = list[int]


@dataclass(slots=True)
class Body:
    """A request to the decode instance."""

    prompts: list[Ids]
    salt: str | None
    key: str
    fields: dict[str, Any]
    is_good: bool = False
    """Whether it has its own prompts' leases."""

    def json(self) -> dict[str, Any]:
        return question(self.prompts, self.salt) | self.fields


@dataclass(frozen=True, slots=True)
class Ground:
    """The prefill instance's answer for some prompts, and earlier answers for others."""

    prompts: list[Ids]
    salt: str
    key: str
    params: Params
    past: Sequence["Ground"]
    pair: Pair


Forgery = Callable[[Ground, random.Random, Iterator[str]], Body]


def question(prompts: Sequence[Ids], salt: str | None) -> dict[str, Any]:
    """Request a few tokens that depend on the whole prompt."""
    salted = {} if salt is None else {"cache_salt": salt}
    return salted | {
        "prompt": list(prompts),
        "max_tokens": ANSWER,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _of(ground: Ground, params: Any, *, prompts: list[Ids] | None = None, **own: Any) -> Body:
    """Return a body with these params, and otherwise what the leases belong to."""
    body = Body(prompts or ground.prompts, ground.salt, ground.key, {"kv_transfer_params": params})
    for name, value in own.items():
        setattr(body, name, value)
    return body


def one(ground: Ground, place: int) -> Params:
    """Return the params of a single prompt."""
    params = copy.deepcopy(ground.params)
    params["specdec"]["leases"] = [params["specdec"]["leases"][place]]
    return params


def good(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    return _of(ground, copy.deepcopy(ground.params), is_good=True)


def swapped(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Swap the prompts' leases."""
    params = copy.deepcopy(ground.params)
    leases = params["specdec"]["leases"]
    params["specdec"]["leases"] = leases[1:] + leases[:1]
    return _of(ground, params)


def swapped_id(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Keep the MACs, and swap what they authenticate."""
    params = copy.deepcopy(ground.params)
    leases = params["specdec"]["leases"]
    ids = [lease["lease"] for lease in leases]
    for own, id in zip(leases, ids[1:] + ids[:1], strict=True):
        own["lease"] = id
    return _of(ground, params)


def stale(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Use leases that were released long ago, of other prompts and salts."""
    past = rng.choice(ground.past) if ground.past else ground
    return _of(ground, copy.deepcopy(past.params), salt=next(salts))


def reused(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Use leases already read for the same prompts under the same salt."""
    past = rng.choice(ground.past) if ground.past else ground
    return _of(past, copy.deepcopy(past.params))


def other_salt(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    return _of(ground, copy.deepcopy(ground.params), salt=next(salts))


def no_salt(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    body = _of(ground, copy.deepcopy(ground.params))
    body.salt = None
    return body


def other_key(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Use another tenant's key, with a new salt."""
    (other,) = {*KEYS} - {ground.key}
    return _of(ground, copy.deepcopy(ground.params), key=other, salt=next(salts))


def mac(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Alter a character of the MAC, truncate it, empty it, or use an invalid one."""
    params = copy.deepcopy(ground.params)
    for own in params["specdec"]["leases"]:
        text, place = own["mac"], rng.randrange(len(own["mac"]))
        flipped = text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :]
        own["mac"] = rng.choice([flipped, text[:-1], "", text.upper() + "é", "\ud800", "0" * 64])
    return _of(ground, params, salt=next(salts))


def lease_id(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    params = copy.deepcopy(ground.params)
    for own in params["specdec"]["leases"]:
        drawn = f"{rng.getrandbits(128):032x}"
        text = own["lease"]
        own["lease"] = rng.choice(
            [drawn, text[:-1], text.upper(), f"../{text}", f"{text}/open", f"{text}%00", "é"]
        )
    return _of(ground, params, salt=next(salts))


def engine(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Name another engine id, a wrong one or none."""
    params = copy.deepcopy(ground.params)
    name = params["remote_engine_id"]
    params["remote_engine_id"] = rng.choice([f"{rng.getrandbits(128):032x}", name[::-1], "", None, "é"])
    return _of(ground, params, salt=next(salts))


def address(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Redirect the fetch: to an address that is not allowed, or to another port."""
    params = copy.deepcopy(ground.params)
    where = (
        "127.0.0.2",
        "localhost",
        "0.0.0.0",
        "[::1]",
        "169.254.169.254",
        "127.0.0.1.",
        "a b",
        "2130706433",
    )
    if rng.random() < 0.5:
        params["remote_host"] = rng.choice(where)
    else:
        http = int(ground.pair.prefill.url.rsplit(":", 1)[1])
        params["remote_port"] = rng.choice([http, 1, 5600, 65535, None])
    return _of(ground, params, salt=next(salts))


def lengths(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Claim more or fewer tokens, leases or ranks than there are."""
    params = copy.deepcopy(ground.params)
    kind = rng.randrange(4)
    if kind == 0:
        params["remote_num_tokens"] = rng.choice([0, -1, TOKENS, TOKENS - 2, 1 << 40])
    elif kind == 1:
        params["tp_size"] = rng.choice([0, 2, -1, 1 << 31])
    else:
        leases = params["specdec"]["leases"]
        params["specdec"]["leases"] = rng.choice(
            [leases[:-1], [*leases, leases[0]], [], [None] * len(leases)]
        )
    return _of(ground, params, salt=next(salts))


def block_ids(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Add block ids, as other engines' params have them: they must be ignored."""
    params = copy.deepcopy(ground.params)
    params["remote_block_ids"] = rng.choice([[0], [*range(64)], [[1, 2]], [-1], [1 << 40]])
    params["state"] = 1
    return _of(ground, params, salt=next(salts))


def types(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Replace a value by one of another type."""
    params = copy.deepcopy(ground.params)
    places = [(params, name) for name in params] + [(params["specdec"], name) for name in params["specdec"]]
    places += [(own, name) for own in params["specdec"]["leases"] for name in own]
    owner, name = rng.choice(places)
    owner[name] = rng.choice([None, True, 0, -1, 1.5, "x", [], {}, [[]], "\x00", "9" * 300])
    return _of(ground, params, salt=next(salts))


def missing(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    params = copy.deepcopy(ground.params)
    owner = rng.choice([params, params["specdec"], params["specdec"]["leases"][0]])
    owner.pop(rng.choice([*owner]))
    return _of(ground, params, salt=next(salts))


def other_prompt(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Request a prompt that differs in one token, or is longer or shorter, with another one's lease."""
    place = rng.randrange(len(ground.prompts))
    prompt = rng.choice([own for own in altered(ground.prompts[place]) if own != ground.prompts[place]])
    return _of(ground, one(ground, place), prompts=[prompt])


def room(ground: Ground, rng: random.Random, salts: Iterator[str]) -> Body:
    """Send SGLang's fields with a closed room, beside params or alone."""
    fields: dict[str, Any] = {
        "bootstrap_host": ["127.0.0.1"] * len(ground.prompts),
        "bootstrap_port": [rng.choice([1, 65535])] * len(ground.prompts),
        "bootstrap_room": [rng.getrandbits(63) for _ in ground.prompts],
    }
    if rng.random() < 0.5:
        fields["kv_transfer_params"] = copy.deepcopy(ground.params)
    return Body(ground.prompts, next(salts), ground.key, fields)


FORGERIES: Mapping[str, Forgery] = {
    own.__name__: own
    for own in (
        *(swapped, swapped_id, stale, reused, other_salt, no_salt, other_key, mac, lease_id, engine, address),
        *(lengths, block_ids, types, missing, other_prompt, room),
    )
}


def altered(prompt: Ids) -> list[Ids]:
    """Return a prompt and its alterations; only the last token is not part of the lease."""
    first, middle, last = (prompt.copy() for _ in range(3))
    first[0], middle[40], last[-1] = first[0] ^ 1, middle[40] ^ 1, last[-1] ^ 1
    return [prompt, first, middle, last, prompt[:-1], [*prompt, 7], prompt[16:], [*prompt[16:], *prompt[:16]]]


@dataclass(slots=True)
class Report:
    """The results of all bodies."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    """Bodies of which at least one prompt was fetched."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Fuzz:
    """Send bodies to a pair, and compare each answer with that of one server for the same prompt."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self._pair, self._rng = pair, random.Random(seed)
        self._salts = map(f"salt-{seed}-{{}}".format, itertools.count())
        self._prompts = [self._draw() for _ in range(PROMPTS)]
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._past: list[Ground] = []
        self.report = Report()

    def _draw(self) -> Ids:
        return [self._rng.randrange(10, VOCAB) for _ in range(TOKENS)]

    async def run(self, bodies: int, at_once: int) -> Report:
        """Send `bodies` requests from `at_once` clients."""
        start_s = time.monotonic()
        limit = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(
            timeout=limit, connector=aiohttp.TCPConnector(limit=0)
        ) as self._http:
            await self._learn()
            left = iter(range(-(-bodies // BODIES)))
            await asyncio.gather(*(self._work(left) for _ in range(at_once)))
        self.report.seconds = time.monotonic() - start_s
        return self.report

    async def _learn(self) -> None:
        """Record the decode instance's own answer to each prompt."""
        prompts = [own for prompt in self._prompts for own in altered(prompt)]
        for start in range(0, len(prompts), 16):
            part = prompts[start : start + 16]
            status, answer = await self._ask(
                self._pair.decode.url, question(part, next(self._salts)), KEYS[0]
            )
            assert status == 200, answer
            for prompt, ids in zip(part, _ids(answer), strict=True):
                self._expected[tuple(prompt)] = ids
        distinct = len({*map(tuple, self._expected.values())})
        # An altered token far from the end may not change the answer.
        assert distinct > 0.5 * len(self._expected), f"{distinct} answers of {len(self._expected)} prompts"
        assert len({tuple(self._expected[tuple(own)]) for own in self._prompts}) == PROMPTS

    async def _work(self, rounds: Iterator[int]) -> None:
        for _ in rounds:
            ground = await self._lent()
            names = self._rng.choices([*FORGERIES], k=BODIES - 1)
            # The honest body goes last: until then there is something to steal.
            await asyncio.gather(*(self._send(name, FORGERIES[name], ground) for name in names))
            await self._send("good", good, ground)
            self._past = [*self._past[-30:], ground]

    async def _lent(self) -> Ground:
        prompts = self._rng.sample(self._prompts, LEASES)
        salt, key = next(self._salts), self._rng.choice(KEYS)
        body = question(prompts, salt) | {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
        status, answer = await self._ask(self._pair.prefill.url, body, key)
        assert status == 200, answer
        return Ground(prompts, salt, key, answer["kv_transfer_params"], tuple(self._past), self._pair)

    async def _send(self, name: str, forge: Forgery, ground: Ground) -> None:
        body = forge(ground, self._rng, self._salts)
        report = self.report
        report.sent[name] += 1
        status, answer = await self._ask(self._pair.decode.url, body.json(), body.key)
        report.statuses[f"{name}: {status}"] += 1
        if status != 200:
            if status not in STATUSES or "error" not in answer or body.is_good:
                report.wrong.append(f"{name}: {status} {answer!r:.300}")
            return
        expected = [self._expected[tuple(prompt)] for prompt in body.prompts]
        if _ids(answer) != expected:
            report.wrong.append(f"{name}: {_ids(answer)} instead of {expected}: {body.fields!r:.600}")

    async def _ask(self, url: str, body: Mapping[str, Any], key: str) -> tuple[int, Any]:
        data = json.dumps(body).encode()  # in ASCII, including lone surrogates
        headers = {"Content-Type": "application/json", **authorized(key)}
        async with self._http.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())


def _ids(answer: Mapping[str, Any]) -> list[list[int]]:
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [choice["token_ids"] for choice in choices]


def opened(model: Path, **own: str) -> AbstractContextManager[Pair]:
    """Start a pair that accepts both tenants' keys."""
    return paired("--api-key", KEYS[1], key=KEYS[0], model=str(model), **own)


def settled(pair: Pair, patience_s: float = 60.0) -> dict[str, Any]:
    """Wait until neither server holds anything for the other and both have checked their memory."""
    until_s, found = time.monotonic() + patience_s, dict[str, Any]()
    while time.monotonic() < until_s:
        for name, live in (("prefill", pair.prefill), ("decode", pair.decode)):
            headers = authorized(KEYS[0])
            figures, info = live.metrics(), live.ask("/server_info", **headers).json
            names = ("leases", "fetching", "holds", "quarantined", "quarantined_bytes", "rooms_waiting")
            found[name] = {own: total(figures, f"specdec:reach_{own}") for own in names}
            found[name] |= {own: info[own] for own in ("running", "waiting", "failed_steps")}
            found[name]["used_bytes"] = sum(
                info["arena"][f"{own}_bytes"] for own in ("block", "state", "record")
            )
        if not any(value for own in found.values() for value in own.values()):
            return {}
        time.sleep(0.2)
    return found


def outcomes(pair: Pair) -> dict[str, float]:
    """Return the numbers of fetches by outcome."""
    figures = pair.decode.metrics()
    found = ((key, value) for key, value in figures.items() if key.startswith("specdec:reach_fetches_total"))
    return {key.split('outcome="')[1].split('"')[0]: value for key, value in found if value}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder that a random checkpoint is written to")
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.model.exists():
        write_random_checkpoint(args.model, SMALL, seed=0)
    with opened(args.model) as pair:
        report = asyncio.run(Fuzz(pair, args.seed).run(args.bodies, args.at_once))
        left = settled(pair)
        print(
            f"{report.sent.total()} bodies in {report.seconds:.0f} s: {dict(sorted(report.statuses.items()))}"
        )
        print(f"fetches of the server that writes: {outcomes(pair)}; left: {left}")
    print(*report.wrong[:20], sep="\n")
    return int(bool(report.wrong or left))


if __name__ == "__main__":
    sys.exit(main())
