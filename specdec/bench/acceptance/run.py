"""The run: all settings take turns on every batch of prompts; texts are checked and results summarised."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.acceptance.engines import EngineCache
from specdec.bench.acceptance.measure import (
    AnswerLength,
    Measurement,
    TokenizedPrompt,
    measure,
    measure_peer,
    params_for,
    pieces,
)
from specdec.bench.acceptance.page import write_page
from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.bench.acceptance.settings import TRANSFORMERS, Setting, SettingGroup, Sweep
from specdec.bench.acceptance.store import ResultStore
from specdec.bench.acceptance.summary import RESULT, PairedBatch, records
from specdec.bench.acceptance.table import render
from specdec.bench.agreement import require_rounding, rounding
from specdec.bench.options import refuse_ranks
from specdec.bench.peers import TransformersPeer
from specdec.bench.random_model import quiet_transformers
from specdec.bench.report import ReportOutput, environment, json_line, publish, until_interrupted
from specdec.config.drafters import NONE
from specdec.config.engine import EngineConfig
from specdec.core.acceptance_stats import AcceptanceSnapshot
from specdec.errors import ConfigError
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import read_network, stored_format
from specdec.text.chat_template import render as render_chat
from specdec.text.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")

EXAMPLES = 3
"""Example texts per setting in a report, one per category."""
SHOWN = 400
"""Characters of a prompt shown with its example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceOptions:
    """The settings of one benchmark run."""

    model: str
    sweep: Sweep
    prompts: Sequence[BenchPrompt]
    length: AnswerLength
    seed: int
    warmup: int
    """Uncounted prompts that warm up each setting."""
    memory: int | None
    """Memory limit of all engines beside the weights, in bytes."""
    arguments: Mapping[str, Any]
    """The arguments, as the report shows them."""


@dataclass(frozen=True, slots=True)
class PromptCategory:
    """A batch of prompts of one category, which all settings of a group process in turn."""

    group: SettingGroup
    number: int
    batch: tuple[TokenizedPrompt, ...]

    @property
    def category(self) -> str:
        return self.batch[0].category

    def turns(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings, rotated by batch; `transformers` is last, as it needs the others' lengths."""
        own = [s for s in settings if s.name != TRANSFORMERS]
        start = self.number % len(own)
        return [*own[start:], *own[:start], *settings[len(own) :]]


class AcceptanceRun:
    """Own the engines, the measurements, and each setting's speculation state after its warm-up."""

    def __init__(self, options: AcceptanceOptions, config: EngineConfig, out: Path | None) -> None:
        self.options, self.out = options, out
        refuse_ranks(config)
        checkpoint = Checkpoint(options.model)
        tokenizer, network = load_tokenizer(checkpoint.folder), read_network(checkpoint)
        most = network.max_length
        self.asked, too_long = _read(options, checkpoint.folder, tokenizer, most, network.vocab)
        longest = max(len(asked.ids) for asked in self.asked) + options.length.max_tokens
        config = EngineConfig.of(
            config, {"max_running": max(options.sweep.batches), "max_model_len": min(longest, most)}
        )
        identity = _identity(options, config, checkpoint, self.asked)
        self.store = ResultStore(out, identity)
        draftings, left_out = options.sweep.draftings()
        self.engines = EngineCache(checkpoint.folder, config, draftings, options.memory)
        self.left_out = [*too_long, *left_out, *self.engines.left_out]
        wanted = [draft for draft in options.sweep.drafts if draft != NONE]
        if wanted and not self.engines.draftings and not options.sweep.transformers:
            why = "; ".join((*left_out, *self.engines.left_out))
            raise ConfigError(f"--draft: nothing is left to measure ({why})", field="draft")
        self.settings = {
            group: options.sweep.settings(group, self.engines.draftings) for group in options.sweep.groups()
        }
        resolved = self.engines.first.settings
        self.rounded = rounding(resolved, stored_format(checkpoint.config))
        self.peer = (
            TransformersPeer(checkpoint.folder, dtype=resolved.dtype, device=resolved.device)
            if options.sweep.transformers
            else None
        )
        self._experience: dict[Setting, AcceptanceSnapshot] = {}
        self.done: list[PromptCategory] = []
        """Measured in every setting, and checked."""

    def measure(self) -> None:
        """Measure and check every batch; Ctrl-C keeps the finished ones."""
        units = list(self._units())
        total = sum(len(self.settings[unit.group]) for unit in units)
        with tqdm(total=total, leave=False, disable=None) as progress:
            for unit in units:
                for setting in unit.turns(self.settings[unit.group]):
                    progress.set_description(f"{unit.group}: {unit.category}, {setting.name}")
                    key = _key(setting, unit)
                    if self.store.get(*key) is None:
                        self.store.add(*key, measurement=self._measure(setting, unit))
                    progress.update()
                self._check(unit)
                self.done.append(unit)

    def report(self, *, interrupted: bool) -> dict[str, Any]:
        """Build the report of the finished batches."""
        measured = {
            setting: [self._pair(setting, unit) for unit in self.done if unit.group == group]
            for group, settings in self.settings.items()
            for setting in settings
        }
        first = self.engines.first
        return {
            "benchmark": "acceptance",
            **environment(),
            "model": str(self.options.model),
            "family": first.network.spec.family,
            "device": str(first.settings.device),
            "dtype": str(first.settings.dtype).removeprefix("torch."),
            "rounding": self.rounded,
            "arguments": dict(self.options.arguments),
            "left_out": self.left_out,
            "interrupted": interrupted,
            "records": records({setting: pairs for setting, pairs in measured.items() if pairs}),
            "examples": [example for setting in measured for example in self._examples(setting)],
        }

    def _units(self) -> Iterator[PromptCategory]:
        """Alternate categories and groups, so that an interrupted run has some of each."""
        for_group = [
            [PromptCategory(group, number, batch) for number, batch in enumerate(self._batches(group.batch))]
            for group in self.settings
        ]
        yield from _in_turn(for_group)

    def _batches(self, size: int) -> Iterator[tuple[TokenizedPrompt, ...]]:
        """Cut each category into batches, and interleave the categories."""
        categories: dict[str, list[TokenizedPrompt]] = {}
        for asked in self.asked:
            categories.setdefault(asked.category, []).append(asked)
        return _in_turn(
            [[tuple(own[at : at + size]) for at in range(0, len(own), size)] for own in categories.values()]
        )

    def _measure(self, setting: Setting, unit: PromptCategory) -> Measurement:
        if setting.name == TRANSFORMERS:
            plain = self._plain(unit).answers[0]
            assert self.peer is not None
            return measure_peer(self.peer, unit.batch[0], len(plain.token_ids))
        model = self.engines.open(setting.drafting)
        speculation = model.loop.speculation
        if setting not in self._experience:
            speculation.recall(None)
            # At least one: a setting's first steps include its set-up.
            warm = [batch[0] for batch in islice(self._batches(1), max(self.options.warmup, 1))]
            for at in range(0, len(warm), unit.group.batch):
                batch = warm[at : at + unit.group.batch]
                measure(model, batch, [self._params(asked, unit.group, "warm-up") for asked in batch])
            if not self.options.warmup:
                speculation.recall(None)
            self._experience[setting] = speculation.experience()
        # Start each batch from the state after the warm-up: its figures do not depend on other batches or
        # their order.
        speculation.recall(self._experience[setting])
        return measure(model, unit.batch, [self._params(asked, unit.group) for asked in unit.batch])

    def _params(self, asked: TokenizedPrompt, group: SettingGroup, what: str = "") -> Any:
        return params_for(asked, group, self.options.length, self.options.seed, what)

    def _plain(self, unit: PromptCategory) -> Measurement:
        plain = self.store.get(*_key(self.settings[unit.group][0], unit))
        assert plain is not None
        return plain

    def _pair(self, setting: Setting, unit: PromptCategory) -> PairedBatch:
        own = self.store.get(*_key(setting, unit))
        assert own is not None
        return PairedBatch(unit.category, own, self._plain(unit))

    def _check(self, unit: PromptCategory) -> None:
        """Raise if drafts changed an output, unless the dtype's rounding can explain it."""
        if self.rounded:
            return
        for setting in self.settings[unit.group]:
            if setting.name == TRANSFORMERS:
                continue  # its texts are only counted: it is greedy at any temperature
            pair = self._pair(setting, unit)
            for asked, plain, own in zip(unit.batch, pair.plain.answers, pair.own.answers, strict=True):
                if plain.token_ids != own.token_ids:
                    model = self.engines.open(self.settings[unit.group][0].drafting)
                    params = self._params(asked, unit.group)
                    what = (
                        f"{setting.name}, {unit.group} says something else than draft none to "
                        f"{asked.category} {asked.name!r}"
                    )
                    require_rounding(model, asked.ids, params, plain.token_ids, own.token_ids, what)

    def _examples(self, setting: Setting) -> Iterator[dict[str, Any]]:
        """Yield the first text of some categories, cut by token origin."""
        shown: set[str] = set()
        tokenizer = self.engines.first.tokenizer
        for unit in self.done:
            if unit.group != setting.group or unit.category in shown or len(shown) == EXAMPLES:
                continue
            shown.add(unit.category)
            answer = self._pair(setting, unit).own.answers[0]
            ids = unit.batch[0].ids
            yield {
                "setting": f"{setting.name}, {setting.group}",
                "category": unit.category,
                "prompt": (tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)))[-SHOWN:],
                "pieces": [list(piece) for piece in pieces(tokenizer, answer)],
            }


def _key(setting: Setting, unit: PromptCategory) -> tuple[Any, ...]:
    return setting.name, repr(setting.group), unit.number


def run(options: AcceptanceOptions, config: EngineConfig, out: ReportOutput) -> None:
    """Measure and publish the report; with a folder, save measurements, plots and a page there.

    Ctrl-C is raised again once the finished part has been published.
    """
    with quiet_transformers() if options.sweep.transformers else nullcontext():
        whole = AcceptanceRun(options, config, out.path)
        with until_interrupted(whole.done) as interruption:
            whole.measure()
    report = whole.report(interrupted=interruption.happened)
    publish(render(report), report, out.within(RESULT))
    if out.path:
        write_results(report, out.path)
    if interruption.happened:
        raise KeyboardInterrupt


def write_results(result: Mapping[str, Any], folder: Path) -> None:
    """Write a report's records as JSON lines, its plots, and a page."""
    lines = "".join(f"{json_line(record)}\n" for record in result["records"])
    (folder / "results.jsonl").write_text(lines, "utf-8")
    write_page(dict(result), folder)


def _in_turn(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first item of each list, then the second of each, and so on."""
    for some in zip_longest(*lists):
        yield from (item for item in some if item is not None)


def _read(
    options: AcceptanceOptions, folder: Path, tokenizer: Tokenizer | None, most: int, vocab: int
) -> tuple[list[TokenizedPrompt], list[str]]:
    """Tokenize the prompts; return those that fit with an answer, and a message about the others."""
    asked, too_long = [], []
    names: dict[tuple[str, str], int] = {}
    for prompt in options.prompts:
        ids = _ids(prompt, folder, tokenizer)
        if wrong := [token for token in ids if not 0 <= token < vocab]:
            raise ConfigError(
                f"--prompts: {prompt.name} has token id {wrong[0]}, outside the vocabulary; use whole "
                f"numbers from 0 to {vocab - 1}",
                field="prompts",
            )
        if not ids or len(ids) + options.length.max_tokens > most:
            too_long.append(prompt.name)
            continue
        seen = names[prompt.category, prompt.name] = names.get((prompt.category, prompt.name), 0) + 1
        name = prompt.name if seen == 1 else f"{prompt.name} ({seen})"
        asked.append(TokenizedPrompt(prompt.category, name, tuple(ids)))
    if not asked:
        raise ConfigError(
            f"--prompts: none fits the model's {most} tokens with {options.length.max_tokens} of output; "
            "give shorter ones, or lower --max-tokens",
            field="prompts",
        )
    shown = f"{too_long[0]}, …" if len(too_long) > 1 else "".join(too_long)
    why = (
        f"{len(too_long)} prompts ({shown}): empty, or longer than the model's {most} tokens with the output"
    )
    return asked, [why] if too_long else []


def _ids(prompt: BenchPrompt, folder: Path, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Tokenize a prompt; a chat with the checkpoint's template."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    if tokenizer is None:
        raise ConfigError(
            f"--prompts: {folder} has no tokenizer.json; give prompts of token ids", field="prompts"
        )
    if prompt.messages:
        return tokenizer.encode(render_chat(folder, prompt.messages), special=False)
    return tokenizer.encode(prompt.text or "")


def _identity(
    options: AcceptanceOptions, config: EngineConfig, checkpoint: Checkpoint, asked: Sequence[TokenizedPrompt]
) -> dict[str, Any]:
    """Return what must be equal for measurements to belong to one run."""
    files = [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(checkpoint.folder.iterdir())
        if file.suffix in (".safetensors", ".json")
    ]
    prompts = json.dumps([[a.category, a.name, a.ids] for a in asked])
    return {
        "model": str(checkpoint.folder.resolve()),
        "files": files,
        "content of --prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        **{f"--{name.replace('_', '-')}": value for name, value in options.arguments.items()},
        "commit": environment()["commit"],
        "engine": config.model_dump(exclude_unset=True),
    }
