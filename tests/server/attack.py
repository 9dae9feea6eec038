"""One holder of a key tries to read what another's answers hold: by draft trees, by counts, and by the clock.

`python -m tests.server.attack` starts a server of the model that ships with the keys of alice and bob, has
alice write three secrets, plays the attacks as bob and the controls as alice, and does the same to a server
that shares all (`tests.server.sharing`). It prints what came of it; the exit code is 1 if bob has learnt
anything, or if an attack that should succeed has not.
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
    "My number at the clinic is ": "kz4-0fd-81q",
    "The back door opens with ": "q83-zfk-7wj",
}
WRONG = ("zz1-aa2-9xx", "hd5-2px-66b", "m07-ccv-4tr")
"""What a guess may be instead."""
PROMPT = "# Notes of today, not to be shown to anybody else.\n"
REQUESTS = 6
"""That an attack on one secret may send."""
ENOUGH = 5
"""Characters of a secret of eleven that must be seen, right behind its beginning: none comes by chance."""
KEYS = ("--api-key", "alice", "--api-key", "bob")
FIXED = ("--no-adaptive", "--num-steps", "6", "--topk", "1", "--max-running", "4", "--dtype", "float32")
"""Drafts whose number hangs on no clock."""


class Cost(NamedTuple):
    """What an answer says of itself, and what it took: all that time hangs on but the machine."""

    read: tuple[int, int]
    """Tokens of the prompt that were read before, and that were computed now."""
    steps: int
    """Verify steps. A mask that comes late leaves a draft unused, so a few more or less tell nothing."""


SAVED = 0.75
"""Of the steps that the same guesses take where alice has not written: fewer tell."""


@dataclass
class Client:
    """The holder of a key, who perhaps gives a salt."""

    live: Live
    key: str
    salt: str | None = None
    heard: list[list[str]] = field(default_factory=list)
    """What each tree of the last answer has shown, spelled from its beginning, the latest node last."""

    def ask(self, regex: str, **own: Any) -> Any:
        """Have an answer written that a regular expression spells."""
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
        """Have a text written behind a prompt; return what that has cost."""
        answer = self.ask(re.escape(text), prompt=prompt)
        usage = answer["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return Cost((cached, usage["prompt_tokens"] - cached), len(answer["choices"][0]["drafts"]))

    def flush(self) -> None:
        """Have the server forget what it has kept of one's own."""
        answer = self.live.ask("/flush_cache", method="POST", Authorization=f"Bearer {self.key}")
        assert answer.status == 200, answer.data

    def reads(self, beginning: str, secret: str) -> bool:
        """Spell what is known, and read on where a tree goes on from it; tell if the secret was seen."""
        known = beginning
        for turn in range(REQUESTS):
            self.ask(re.escape(known) + "[ -~]{1,3}", temperature=0.3 * (turn % 2), seed=turn)
            shown = "".join(text + "\n" for texts in self.heard for text in texts)
            if beginning + secret[:ENOUGH] in shown:
                return True
            # The first tree that goes beyond was made of nothing that was not known.
            beyond = ([text for text in texts if text.startswith(known)] for texts in self.heard)
            longer = next((texts[-1] for texts in beyond if texts and texts[-1] != known), known)
            known = longer.partition("<|")[0]  # where it ended
        return False


def spelled(drafts: Sequence[Any]) -> Iterator[list[str]]:
    """Yield of each tree of an answer the whole texts that its paths stand for."""
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
    """What the attacks have brought to light."""

    read: dict[str, int]
    """By who attacked: how many secrets were read from trees."""
    told: dict[str, bool]
    """By who guessed: whether right guesses of texts take fewer steps once alice has written."""
    hit: dict[str, bool]
    """By who guessed: whether any prompt has more or fewer tokens read before, or computed."""
    steady: bool
    """The control of both: without alice neither differs from one time to the next."""
    times_ms: dict[str, list[float]]
    """Bob's medians of the right and of the wrong guesses."""

    def is_secure(self) -> bool:
        """Tell whether alice is served with her own, and no other is."""
        alone = self.read["alice"] == len(SECRETS) and self.told["alice"] and self.hit["alice"]
        others = [
            found[name] for found in (self.read, self.told, self.hit) for name in found if name != "alice"
        ]
        return self.steady and alone and not any(others)


def attack(live: Live, rounds: int = 0) -> Report:
    """Have everybody try to read what alice has written, and compare with what there is where she has not."""
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
    """Tell whether right guesses of texts, the last half, take far fewer steps."""
    half = len(before) // 2
    return sum(own.steps for own in after[half::2]) < SAVED * sum(own.steps for own in before[half::2])


def are_hit(before: Sequence[Cost], after: Sequence[Cost]) -> bool:
    """Tell whether any prompt was read in another way."""
    return [own.read for own in before] != [own.read for own in after]


def begin_anew(alice: Client, bob: Client, *, writes: bool) -> None:
    """Have all forgotten; then alice may have her secrets written, and read as prompts."""
    for client in (alice, bob):
        client.flush()
    for begin, secret in SECRETS.items() if writes else ():
        alice.write(begin + secret)
        alice.write("x", noted(begin + secret))


def noted(text: str) -> str:
    """Make a prompt of a text."""
    return PROMPT + (text + "\n") * 8


def guess(alice: Client, bob: Client, client: Client, *, writes: bool) -> list[Cost]:
    """Guess what alice has written, and what prompts she has had read, wrongly and rightly."""
    begin_anew(alice, bob, writes=writes)
    guesses = [begin + end for begin, end in zip(SECRETS, WRONG, strict=True)]
    guesses += [begin + secret for begin, secret in SECRETS.items()]
    return [client.write(*own) for text in guesses for own in ((text, PROMPT), ("x", noted(text)))]


def time_guesses(alice: Client, bob: Client, rounds: int) -> dict[str, list[float]]:
    """Time right and wrong guesses in turns; all is forgotten, and written anew, in between."""
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
    """Attack the server as it is, and one that shares all."""
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
