"""A key holder tries to learn another's outputs: from draft trees, token counts and timing.

`python -m tests.server.attack` starts a server of the shipped model with keys for alice and bob, lets alice
generate three secrets, runs the attacks as bob and the controls as alice, and repeats this on a server that
shares everything (`tests.server.sharing`). It prints the results; the exit code is 1 if bob learns anything,
or if an attack that should succeed fails.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.server.live import Live

PATH = "/v1/completions"
SECRETS = {
    "The password of the bank is ": "wq7-kd9-3fz",
    "The code at the clinic is ": "kz4-0fd-81q",
    "The back door opens with ": "q83-zfk-7wj",
}
"""By their beginnings, all of which the attack reads back from a server that shares everything. A grammar
tokenizes a forced text as a whole, so some other texts are not found once their first token is known."""
WRONG = ("zz1-aa2-9xx", "hd5-2px-66b", "m07-ccv-4tr")
"""Wrong guesses."""
PROMPT = "# Notes of today, not to be shown to anybody else.\n"
REQUESTS = 6
"""Maximum requests of an attack on one secret."""
ENOUGH = 5
"""Characters of the eleven of a secret that must be seen directly after its start, which rules out chance."""
KEYS = ("--api-key", "alice", "--api-key", "bob")
FIXED = ("--no-adaptive", "--num-steps", "6", "--topk", "1", "--max-running", "4", "--dtype", "float32")
"""Draft settings that do not depend on timing."""


class Cost(NamedTuple):
    """An answer's token counts and steps: everything that time depends on except the machine."""

    read: tuple[int, int]
    """Cached and computed prompt tokens."""
    steps: int
    """Verify steps. A late grammar mask leaves a draft unused, so small differences mean nothing."""


SAVED = 0.75
"""Below this share of the steps that the same guesses take without alice's outputs, the attack succeeds."""


@dataclass
class Client:
    """A key holder, optionally with a cache salt."""

    live: Live
    key: str
    salt: str | None = None
    heard: list[list[str]] = field(default_factory=list)
    """For each draft tree of the last answer, the texts of its paths, the latest node last."""

    def ask(self, regex: str, **own: Any) -> Any:
        """Generate an answer constrained by a regular expression."""
        body = {
            "prompt": PROMPT,
            "structured_outputs": {"regex": regex},
            "max_tokens": 96,
            "temperature": 0.0,
            "return_drafts": True,
            **({"cache_salt": self.salt} if self.salt else {}),
            **own,
        }
        answer = self.live.ask(PATH, body, Authorization=f"Bearer {self.key}")
        assert answer.status == 200, answer.data
        self.heard = list(spelled(answer.json["choices"][0]["drafts"]))
        return answer.json

    def write(self, text: str, prompt: str = PROMPT) -> Cost:
        """Generate a given text after a prompt; return its cost."""
        answer = self.ask(re.escape(text), prompt=prompt)
        usage = answer["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return Cost((cached, usage["prompt_tokens"] - cached), len(answer["choices"][0]["drafts"]))

    def flush(self) -> None:
        """Flush the caller's own cache."""
        answer = self.live.ask("/flush_cache", method="POST", Authorization=f"Bearer {self.key}")
        assert answer.status == 200, answer.data

    def reads(self, beginning: str, secret: str) -> bool:
        """Extend the known text from draft trees that go beyond it; return whether the secret was seen."""
        known = beginning
        for turn in range(REQUESTS):
            self.ask(re.escape(known) + "[ -~]{1,3}", temperature=0.3 * (turn % 2), seed=turn)
            shown = "".join(text + "\n" for texts in self.heard for text in texts)
            if beginning + secret[:ENOUGH] in shown:
                return True
            # The first tree that goes beyond the known text was drafted without new information.
            beyond = ([text for text in texts if text.startswith(known)] for texts in self.heard)
            longer = next((texts[-1] for texts in beyond if texts and texts[-1] != known), known)
            known = longer.partition("<|")[0]  # up to the end token
        return False


def spelled(drafts: Sequence[Any]) -> Iterator[list[str]]:
    """Yield, for each tree of an answer, the full texts of its paths."""
    said = ""
    for draft in drafts:
        texts = list[str]()
        for text, parent in zip(draft["texts"], draft["parents"], strict=True):
            texts.append((texts[parent] if parent >= 0 else said) + text)
        yield texts[1:]
        accepted = draft["accepted"]
        said = texts[accepted[-1]] if accepted else texts[0]


@dataclass(frozen=True)
class Report:
    """The results of the attacks."""

    read: dict[str, int]
    """By attacker: how many secrets were read from trees."""
    told: dict[str, bool]
    """By attacker: whether right text guesses take fewer steps once alice has generated them."""
    hit: dict[str, bool]
    """By attacker: whether any prompt's cached or computed tokens change."""
    steady: bool
    """The control for both: without alice, neither changes between runs."""
    times_ms: dict[str, list[float]]
    """Bob's median times for right and wrong guesses."""

    def is_secure(self) -> bool:
        """Return whether alice benefits from her own outputs, and no one else does."""
        alone = self.read["alice"] == len(SECRETS) and self.told["alice"] and self.hit["alice"]
        others = [
            found[name] for found in (self.read, self.told, self.hit) for name in found if name != "alice"
        ]
        return self.steady and alone and not any(others)


def attack(live: Live, rounds: int = 0) -> Report:
    """Attack alice's outputs as each client, and compare with a run without them."""
    alice, bob = Client(live, "alice"), Client(live, "bob")
    clients = {
        "bob": bob,
        "bob, salted": Client(live, "bob", "x"),
        "alice, salted": Client(live, "alice", "x"),
        "alice": alice,
    }
    read, told, hit, steady = dict[str, int](), dict[str, bool](), dict[str, bool](), True
    for name, client in clients.items():
        begin_anew(alice, bob, writes=True)
        read[name] = sum(client.reads(begin, secret) for begin, secret in SECRETS.items())
        before, again, after = (guess(alice, bob, client, writes=writes) for writes in (False, False, True))
        steady = steady and not (are_told(before, again) or are_told(again, before) or are_hit(before, again))
        told[name], hit[name] = are_told(before, after), are_hit(before, after)
    return Report(read, told, hit, steady, time_guesses(alice, bob, rounds) if rounds else {})


def are_told(before: Sequence[Cost], after: Sequence[Cost]) -> bool:
    """Return whether right text guesses, the last half, take far fewer steps."""
    half = len(before) // 2
    return sum(own.steps for own in after[half::2]) < SAVED * sum(own.steps for own in before[half::2])


def are_hit(before: Sequence[Cost], after: Sequence[Cost]) -> bool:
    """Return whether any prompt's token counts changed."""
    return [own.read for own in before] != [own.read for own in after]


def begin_anew(alice: Client, bob: Client, *, writes: bool) -> None:
    """Flush all caches; then alice may generate her secrets, and prefill them as prompts."""
    for client in (alice, bob):
        client.flush()
    for begin, secret in SECRETS.items() if writes else ():
        alice.write(begin + secret)
        alice.write("x", noted(begin + secret))


def noted(text: str) -> str:
    """Make a prompt of a text."""
    return PROMPT + (text + "\n") * 8


def guess(alice: Client, bob: Client, client: Client, *, writes: bool) -> list[Cost]:
    """Guess alice's outputs and prompts, wrongly and rightly; return the costs."""
    begin_anew(alice, bob, writes=writes)
    guesses = [begin + end for begin, end in zip(SECRETS, WRONG, strict=True)]
    guesses += [begin + secret for begin, secret in SECRETS.items()]
    return [client.write(*own) for text in guesses for own in ((text, PROMPT), ("x", noted(text)))]


def time_guesses(alice: Client, bob: Client, rounds: int) -> dict[str, list[float]]:
    """Time right and wrong guesses in turn, resetting all state in between."""
    begin, secret = next(iter(SECRETS.items()))
    taken: dict[str, list[float]] = {"right": [], "wrong": []}
    for _ in range(rounds):
        for name, end in (("right", secret), ("wrong", WRONG[0])):
            begin_anew(alice, bob, writes=True)
            start_s = time.perf_counter()
            bob.write(begin + end)
            taken[name].append((time.perf_counter() - start_s) * 1e3)
    return taken


def main() -> int:
    """Attack the normal server, and one that shares everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", default="suffix", help="who drafts (suffix)")
    parser.add_argument("--rounds", type=int, default=0, help="how often guesses are timed, in turns (0)")
    options = parser.parse_args()
    found = {}
    for name, entry in (("kept apart", "specdec.cli"), ("shared by all", "tests.server.sharing")):
        with Live("--draft", options.draft, *FIXED, *KEYS, entry=entry) as live:
            found[name] = report = attack(live, options.rounds)
        print(
            f"{name}: secrets read of {len(SECRETS)}: {report.read}; steps tell: {report.told}; "
            f"prompts tell: {report.hit}; steady without alice: {report.steady}"
        )
        for guess, ms in report.times_ms.items():
            tenths = statistics.quantiles(ms, n=10)
            print(f"  {guess} guesses: {statistics.median(ms):.2f} ms ({tenths[0]:.2f} to {tenths[-1]:.2f})")
    secure, mutant = found["kept apart"].is_secure(), found["shared by all"].is_secure()
    noticed = not mutant and found["shared by all"].steady
    print(json.dumps({"secure": secure, "mutant_is_noticed": noticed}))
    return 0 if secure and noticed else 1


if __name__ == "__main__":
    sys.exit(main())
