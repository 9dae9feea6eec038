"""From local text to a checkpoint: corpus, tokenizer, trunk, heads, files. Every stage is resumable."""

import hashlib
import json
import logging
import platform
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
import torch

from tools.train_tiny import corpus, tokens
from tools.train_tiny.answers import answers
from tools.train_tiny.card import STAGES, write_card
from tools.train_tiny.distil import agreement, head_step
from tools.train_tiny.export import EAGLE, export, export_eagle
from tools.train_tiny.heads import MTP, Eagle3, Head
from tools.train_tiny.pretrain import held_out_loss, trunk_step
from tools.train_tiny.recipe import Recipe
from tools.train_tiny.stage import Plan, digest, run
from tools.train_tiny.tokens import Stream
from tools.train_tiny.trunk import Trunk
from tools.train_tiny.unloop import circling, unloop_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    """Training and held-out text, as token streams."""

    training: Stream
    held_out: Stream
    counts: list[int]
    about: dict[str, object]


def train(recipe: Recipe, out: Path, work: Path, device: torch.device) -> dict[str, object]:
    """Train a recipe and write the checkpoint to `out`; return the figures of its card.

    `work` holds the streams, resume checkpoints and logs; it is not needed afterwards.
    """
    sizes = recipe.sizes()
    text = _text(work, out, sizes.vocab_size, sizes.max_position_embeddings)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(recipe.trunk.seed)
    trunk = Trunk(sizes, dtype=dtype).to(device)
    run("trunk", recipe.trunk, trunk, trunk_step(trunk, text.training, recipe.trunk), work)
    for turn in range(recipe.rounds):
        unlearn(f"unloop-{turn}", recipe, turn, trunk, text.training, out, work)
    trunk.eval().requires_grad_(False)
    said = say("heads", recipe, recipe.said, recipe.mtp.seed, trunk, text.training, out, work)
    mtp, eagle = heads(recipe, text.counts)
    for name, head, plan in (("mtp", mtp, recipe.mtp), ("eagle", eagle, recipe.eagle)):
        teach(name, head, plan, recipe.depth, trunk, text.training, said, work)
    export(out, recipe.config, trunk, mtp, torch.bfloat16)
    export_eagle(out / EAGLE, eagle, torch.bfloat16)
    with torch.compiler.set_stance("force_eager"):
        # Run once per model, with sizes that were not compiled.
        figures = _figures(trunk, {"mtp": mtp, "eagle": eagle}, text, recipe) | _spent(work, recipe.rounds)
    write_card(out, recipe, text.about, figures, work)
    return figures


def heads(recipe: Recipe, counts: list[int]) -> tuple[MTP, Eagle3]:
    """Create both heads; the EAGLE head drafts the most frequent tokens."""
    torch.manual_seed(recipe.mtp.seed)
    commonest = torch.tensor(counts).argsort(descending=True, stable=True)[: recipe.draft_vocab]
    return MTP(recipe.sizes()), Eagle3(recipe.sizes(), commonest.sort().values)


def unlearn(
    name: str, recipe: Recipe, turn: int, trunk: Trunk, stream: Stream, out: Path, work: Path
) -> None:
    """Sample the trunk's current answers, and train it in place against loops."""
    plan = replace(recipe.unloop, seed=recipe.unloop.seed + turn)
    said = say(name, recipe, recipe.answers, plan.seed, trunk, stream, out, work)
    if not circling(torch.from_numpy(said.astype("int64"))).any():
        logger.info("%s: no answer goes in circles, so nothing is to be unlearnt", name)
        return
    run(name, plan, trunk, unloop_step(trunk, stream, said, plan), work)


def say(
    name: str, recipe: Recipe, count: int, seed: int, trunk: Trunk, stream: Stream, out: Path, work: Path
) -> Stream:
    """Return the trunk's current answers to `count` prompts, cached in a file."""
    kept = work / f"{name}-{digest(trunk)[:12]}-{count}-{seed}.npy"
    if not kept.exists():
        export(out, recipe.config, trunk, None, torch.bfloat16)
        fresh = kept.with_suffix(".new.npy")
        np.save(fresh, answers(out, stream, count=count, seed=seed))
        fresh.replace(kept)
    said: Stream = np.load(kept)
    return said


def teach(
    name: str, head: Head, plan: Plan, depth: int, trunk: Trunk, stream: Stream, said: Stream, work: Path
) -> None:
    """Train a head in place, initialised from the target's weights."""
    head.begin(trunk)
    head.to(trunk.embed_tokens.weight.device)
    fed = hashlib.sha256(said.tobytes()).hexdigest()[:12]
    run(name, plan, head, head_step(head, trunk, stream, said, plan, depth), work, fed=fed)
    head.eval().requires_grad_(False)


def _text(work: Path, out: Path, vocab: int, max_length: int) -> Text:
    """Collect and encode the corpus, with a cache; write the tokenizer to `out`."""
    training, held_out = corpus.split(corpus.collect())
    about = {
        "python": platform.python_version(),
        "library": Path(sysconfig.get_paths()["stdlib"]).name,
        "documents": len(training),
        "held_out_documents": len(held_out),
        "characters": sum(len(document.text) for document in training),
        "held_out_characters": sum(len(document.text) for document in held_out),
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
    }
    note = work / "corpus.json"
    if not note.exists() or json.loads(note.read_text()) != about:
        for left in (*work.glob("*.pt"), *work.glob("*.jsonl"), *work.glob("*.npy")):
            left.unlink()  # it belongs to another corpus
        logger.info("teaching a tokenizer %d words from %d files", vocab, len(training))
        tokenizer = tokens.learn(training, vocab)
        np.save(work / "train.npy", tokens.encode(tokenizer, training))
        np.save(work / "held.npy", tokens.encode(tokenizer, held_out))
        tokenizer.save(str(work / "tokenizer.json"))
        note.write_text(json.dumps(about))
    stream = np.load(work / "train.npy")
    counts = np.bincount(stream, minlength=vocab).tolist()
    tokens.save(tokenizers.Tokenizer.from_file(str(work / "tokenizer.json")), counts, out, max_length)
    return Text(stream, np.load(work / "held.npy"), counts, about)


def _figures(trunk: Trunk, heads: dict[str, Head], text: Text, recipe: Recipe) -> dict[str, object]:
    """Return the figures on held-out text."""
    length = max(phase.length for phase in recipe.trunk.phases)
    loss, right = held_out_loss(trunk, text.held_out, length=length)
    figures: dict[str, object] = {"loss": loss, "first_guess": right, "tokens": len(text.training)}
    for name, head in heads.items():
        figures[f"{name}_agreement"] = agreement(head, trunk, text.held_out, recipe.depth, length=256)
    return figures


def _spent(work: Path, rounds: int) -> dict[str, object]:
    """Return the minutes of each stage, summing the rounds."""
    minutes = {}
    logs = {name: [name] for name in STAGES} | {"unloop": [f"unloop-{turn}" for turn in range(rounds)]}
    for name, parts in logs.items():
        found = [log for log in (work / f"{part}.jsonl" for part in parts) if log.exists()]
        lasts = [log.read_text().splitlines()[-1] for log in found]
        minutes[name] = round(sum(json.loads(last)["seconds"] for last in lasts) / 60, 1)
    return {"minutes": minutes}
