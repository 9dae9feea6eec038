"""Locate a model, before any slow import or the server's port."""

import os.path
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from specdec.config.engine import EngineConfig
from specdec.config.folders import has_file
from specdec.config.parser import near
from specdec.errors import CheckpointError
from specdec.models.files import GGUF, INDEX, SINGLE
from specdec.models.gguf.names import MAGIC, SUFFIX, models
from specdec.models.hub.names import HUB, OLLAMA, HubName

SHIPPED: Mapping[str, Path] = MappingProxyType({"tiny": Path(__file__).parents[1] / "assets" / "tiny"})
"""Checkpoints in the package, by name; use ./tiny for your own folder of that name."""

GIVEN = "folder, GGUF file, OWNER/NAME[:TAG] on the hub, tiny"
"""Help text of a model argument."""

_ADDRESS = re.compile(rf"\w{{2,}}:/|{HUB}")
_OLLAMA = re.compile(rf"{OLLAMA}.*|(?:[\w.-]+/)*[\w.-]+:[\w.-]+", re.ASCII)

SHOWN = 240
"""Maximum characters of a name in an error."""


def find_folder(model: str | Path, scratch: Path | None = None) -> Path:
    """Return a model's folder, downloading OWNER/NAME from the hub; errors name alternatives.

    With `scratch` an uncached hub model is only described: a folder in `scratch` gets its files' headers.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise CheckpointError(f"model: {model!r} is not a path; give a folder", field="model")
    folder = SHIPPED.get(str(model), Path(model))
    if not os.path.isdir(folder) and not _is_gguf(folder):  # Path's methods raise OSError for some names
        path, _, tag = str(model).rpartition(":")
        if _is_gguf(Path(path)):
            raise CheckpointError(
                f"{short(model)}: a tag chooses among the files of a repository on the hub, and "
                f"{short(path)} is one file; leave out :{short(tag)}",
                field="model",
            )
        if os.path.isdir(path):
            raise CheckpointError(
                f"{short(model)}: a tag chooses among the files of a repository on the hub, and "
                f"{short(path)} is a local folder; give the path of a .gguf file in it",
                field="model",
            )
        name = HubName.read(str(model))
        if name is None:
            raise CheckpointError(f"{short(model)} {_unknown(str(model))}", field="model")
        folder = _download(name, scratch)
    file = _only_gguf(folder) if os.path.isdir(folder) else folder
    return _described(file, scratch) if file else folder


def _is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF, by suffix or magic bytes: Ollama's files have no suffix."""
    if not os.path.isfile(path) or path.suffix == SUFFIX:
        return os.path.isfile(path)
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def _only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file (or first part) of a folder that is not a checkpoint."""
    is_described = has_file(folder / "config.json") and os.path.lexists(folder / GGUF)
    if is_described or any(os.path.lexists(folder / weights) for weights in (SINGLE, INDEX)):
        return None
    files = models(path.name for path in folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(files[:8])
        raise CheckpointError(f"{short(folder)} holds several GGUF files; give one of {names}", field="model")
    return folder / files[0] if files else None


def _described(file: Path, scratch: Path | None) -> Path:
    # Imported late: only GGUF files need it.
    from specdec.models.gguf.folder import describe

    return describe(file, scratch if scratch and scratch in file.parents else None)


def _unknown(model: str) -> str:
    """Explain why a name is not a model, and what to give instead."""
    hub_name = "OWNER/NAME of a checkpoint or of GGUF files on the Hugging Face hub"
    if re.fullmatch(r".+\.gguf(:[^/]*)?", model, re.DOTALL):
        return "does not exist; give the path of a GGUF file (if split, of its first part)"
    if _OLLAMA.fullmatch(model):
        return (
            "looks like a model of Ollama's library; give the path that `ollama show --modelfile` says it is "
            f"FROM, or {hub_name}"
        )
    if _ADDRESS.match(model):
        return f"is not the URL of a Hugging Face model; give the path of a folder, or {hub_name}"
    if hint := near(model.lower(), SHIPPED):
        return f"is not a folder{hint}"
    if re.fullmatch(r"[\w.-]+", model):
        return (
            f"is neither a folder nor a model that ships with specdec ({', '.join(SHIPPED)}); a model on the "
            "Hugging Face hub is named OWNER/NAME, as in Qwen/Qwen3.5-0.8B, and one of Ollama by its path, "
            "which `ollama show --modelfile` says it is FROM"
        )
    return (
        "is not a folder; give the path of a Hugging Face checkpoint or of a .gguf file, OWNER/NAME of "
        f"either on the hub, or {' or '.join(SHIPPED)}, which ships with specdec"
    )


def find_models(
    model: str | Path, config: EngineConfig, scratch: Path | None = None
) -> tuple[Path, EngineConfig]:
    """Return the model's folder, and the config with its draft head's folder, both downloaded if needed."""
    folder = find_folder(model, scratch)
    if config.draft_model is None:
        return folder, config
    try:
        head = find_folder(config.draft_model, scratch)
    except CheckpointError as error:
        raise CheckpointError(f"draft_model: {error}", field="draft_model") from error
    return folder, EngineConfig.of(config, {"draft_model": str(head)})


@contextmanager
def describable(model: str | Path, config: EngineConfig) -> Iterator[tuple[Path, EngineConfig]]:
    """Yield models to describe, with only the headers of uncached hub models, while the context is open."""
    with TemporaryDirectory(prefix="specdec-") as scratch:
        yield find_models(model, config, Path(scratch))


def _download(name: HubName, scratch: Path | None) -> Path:
    # Imported late: local folders do not need the hub.
    try:
        from specdec.models.hub.headers import find_headers
        from specdec.models.hub.snapshot import find_snapshot
    except ValueError as error:  # from an environment variable read at import
        raise CheckpointError(f"huggingface_hub refuses its settings ({error})", field="model") from error
    return find_snapshot(name) if scratch is None else find_headers(name, scratch)


def short(name: object) -> str:
    """Format a name on one line, shortened."""
    line = " ".join(str(name).splitlines())
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]}…{line[-SHOWN // 4 :]}"
