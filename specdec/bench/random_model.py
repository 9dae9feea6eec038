"""Random checkpoints of a named size, as `transformers` saves them, for benchmarks."""

import hashlib
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec.bench.random_eagle import write_random_eagle
from specdec.bench.random_head import add_random_head
from specdec.config.folders import random_models
from specdec.errors import CapacityError, ConfigError
from specdec.models import families
from specdec.models.families import stored_dtype
from specdec.models.files import HEAD_FOLDERS
from specdec.models.shapes import SHAPES
from specdec.setup.devices import free_memory
from specdec.setup.footprint import measure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DRAFT = f"draft-{platform.node()}-"
"""Folder name prefix of unfinished checkpoints, followed by the process id."""
LARGE = 1 << 30
"""Weights this large take long enough to write that a message is logged."""
SPREAD = 0.05
"""Wider than the usual 0.02: an untrained model would otherwise repeat one token forever."""
RANKED = 8192
"""Vocabulary of a random EAGLE head."""
END_OF_TEXT = "<|endoftext|>"
BYTES = 256
ALPHABET = "Ġetaoinshrdlucmfwypvbgkjqxz"
"""Letters of merged tokens; Ġ is a byte-level vocabulary's space."""


def shape_config(name: str) -> dict[str, Any]:
    """Return the Hugging Face config of a named shape."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}; there are {', '.join(sorted(SHAPES))}", field="shape")
    return dict(SHAPES[name])


def cached_checkpoint(config: Mapping[str, Any], *, seed: int) -> Path:
    """Return a random checkpoint of this config in the user's cache, writing it on first use."""
    versions = torch.__version__, metadata.version("transformers")
    recipe = json.dumps([config, seed, "heads", *versions], sort_keys=True)
    folder = random_models() / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"random models are kept in {folder.parent}, which cannot be made ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from None
    clear_drafts(folder.parent)
    if not folder.exists():
        num_bytes = weight_bytes(config)
        refuse_what_does_not_fit(num_bytes, folder.parent)
        if num_bytes >= LARGE:
            print(
                f"Writing a random model of {num_bytes / 1e9:,.1f} GB to {folder}, where it is kept; drawing "
                "its weights takes a while …",
                file=sys.stderr,
                flush=True,
            )
        try:
            with draft_folder(folder.parent) as draft, quiet_transformers():
                write_random_checkpoint(draft, config, seed=seed)
                _add_eagle(draft, config, seed=seed)
                os.replace(draft, folder)
        except (OSError, SafetensorError) as error:
            if not folder.exists():  # another process may have written it in the meantime
                raise ConfigError(f"{folder} cannot be written ({error}); make room there") from error
    return folder


def _add_eagle(folder: Path, config: Mapping[str, Any], *, seed: int) -> None:
    """Write an EAGLE-3 head of typical size into the folder of a model without a head."""
    network, dtype = families.network(config), stored_dtype(config)
    if network.mtp:
        return
    write_random_eagle(
        folder / next(iter(HEAD_FOLDERS)),
        network,
        seed=seed,
        spread=config.get("initializer_range", SPREAD),
        intermediate_size=3 * network.hidden,
        draft_vocab_size=min(RANKED, network.vocab),
        torch_dtype=str(dtype).removeprefix("torch."),
    )


@contextmanager
def draft_folder(parent: Path) -> Iterator[Path]:
    """Create a temporary folder to write in and move finished files out of; remove it at the end."""
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{os.getpid()}-", dir=parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a model's weights, including its head."""
    footprint = measure(families.network(config), stored_dtype(config))
    return sum(p.bytes for p in (*footprint.target, *footprint.mtp))


def refuse_what_does_not_fit(num_bytes: int, folder: Path) -> None:
    """Refuse a model that exceeds the free memory or disk space."""
    places = {"memory": free_memory(torch.device("cpu")), str(folder): shutil.disk_usage(folder).free}
    for place, free in places.items():
        if num_bytes > free:
            raise CapacityError(
                f"shape: the weights take {num_bytes:,} bytes, and {place} has {free:,} free; choose a "
                "smaller shape, or make room",
                field="shape",
            )


def clear_drafts(folder: Path) -> None:
    """Remove unfinished checkpoints of this machine's killed processes."""
    for draft in folder.glob(f"{DRAFT}*"):
        pid = draft.name.removeprefix(DRAFT).partition("-")[0]
        try:
            os.kill(int(pid), 0)  # checks whether it is alive, without sending a signal
        except ProcessLookupError:
            shutil.rmtree(draft, ignore_errors=True)
        except (PermissionError, ValueError):
            continue


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings; the reports contain the relevant ones."""
    from transformers.utils import logging as hf_logging

    verbosity, progress = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if progress:
            hf_logging.enable_progress_bar()


def write_random_checkpoint(
    folder: Path, config: Mapping[str, Any], *, seed: int, dtype: str | None = None
) -> None:
    """Write config, weights and tokenizer of a random model into `folder`; `dtype` None: the config's own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"initializer_range": SPREAD, **config}
    settings |= {"eos_token_id": BYTES, "bos_token_id": None, "pad_token_id": None}
    settings["dtype"] = dtype or settings.get("dtype", "float32")
    hf_config = AutoConfig.for_model(**settings)
    # Seed only this model's draws; the caller's generator is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, settings["dtype"]))
    model.save_pretrained(folder)
    add_random_head(folder, settings, seed=seed)
    byte_tokenizer(hf_config.vocab_size).save_pretrained(folder)


def byte_tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    """Build a byte-level BPE of exactly this size: the bytes, the end of text, then short invented words.

    Every id has a text, so that a random model's output is visible.
    """
    from transformers import PreTrainedTokenizerFast

    if vocabulary <= BYTES:
        raise ConfigError(f"vocab_size {vocabulary} leaves no room for a byte-level tokenizer; it needs 257")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT]
    merges = list(itertools.islice(invented_words(), vocabulary - len(pieces)))
    pieces += [left + right for left, right in merges]
    bpe = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def invented_words() -> Iterator[tuple[str, str]]:
    """Yield merges endlessly: all pairs of letters, then all pairs with a third letter, and so on."""
    words = list(ALPHABET)
    while True:
        merges = [(word, letter) for word in words for letter in ALPHABET[1:]]
        yield from merges
        words = [left + right for left, right in merges]
