"""Names and memory shares of several models in one process."""

import os
from collections.abc import Sequence
from pathlib import Path

from specdec.config.engine import EngineConfig
from specdec.config.folders import model_name
from specdec.errors import CapacityError, ConfigError, SpecdecError
from specdec.models.folder import find_folder
from specdec.server.resident import Resident
from specdec.server.settings import ServerConfig
from specdec.server.switcher import Switcher
from specdec.setup.devices import free_memory, pick_device
from specdec.setup.memory import AUTO_MEMORY_SHARE
from specdec.setup.resolve import open_model
from specdec.setup.settings import Resolved
from specdec.state_slots.pages import CAN_RELEASE

WEIGHTS_SHARE = 0.6
"""Default fraction of free memory for the weights of several models on a CPU."""


def open_models(models: Sequence[str | Path], engine_config: EngineConfig, config: ServerConfig) -> Switcher:
    """Name the models and divide memory among them; reads no weights.

    `memory_bytes` is divided by the number of models that run at once, `host_cache_bytes` by the number of
    models.
    """
    paths = [find_folder(model) for model in models]
    folders = [folder.resolve() for folder in paths]
    if duplicate := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigError(f"model: {duplicate} was given twice; give each model once.", field="model")
    names, arenas = _names(paths, config), _arenas(len(folders), engine_config, config)
    weights_bytes = config.weights_bytes
    if len(folders) == 1 and weights_bytes is None:
        return Switcher([_resident(folders[0], names[0], engine_config, config)])
    opened = [_open(folder, engine_config) for folder in folders]
    free_bytes = free_memory(pick_device(engine_config.device))
    if weights_bytes is None and _can_rest(engine_config):
        weights_bytes = int(WEIGHTS_SHARE * free_bytes)
    reserved = sum(resolved.weight_bytes for resolved in opened if isinstance(resolved, Resolved))
    left_bytes = free_bytes - (reserved if weights_bytes is None else min(reserved, weights_bytes))
    residents = []
    for folder, own_names, resolved in zip(folders, names, opened, strict=True):
        resident = _resident(folder, own_names, engine_config, config)
        residents.append(resident)
        if isinstance(resolved, SpecdecError):
            resident.refusal = resolved
            continue
        resident.weight_bytes = resolved.weight_bytes
        if weights_bytes is not None and resolved.weight_bytes > weights_bytes:
            resident.refusal = CapacityError(
                f"weights_bytes: the weights of {resident.name} take {resolved.weight_bytes:,} bytes, and "
                f"those of all models may take {weights_bytes:,}; raise it.",
                field="weights_bytes",
            )
        if len(folders) > 1:
            resident.config = _share(resolved, left_bytes, arenas=arenas, models=len(folders))
    return Switcher(residents, arenas=arenas, weights_bytes=weights_bytes, switch_after_s=config.switch_after)


def _names(folders: Sequence[Path], config: ServerConfig) -> list[list[str]]:
    """Return each model's names: as given, or its folder's; a single model may have several.

    A link counts by its own name.
    """
    served_names = config.served_model_name
    if served_names and len(folders) == 1:
        return [served_names]
    if served_names and len(served_names) != len(folders):
        raise ConfigError(
            f"served_model_name: {len(served_names)} names were given for {len(folders)} models; give one "
            "for each, in their order.",
            field="served_model_name",
        )
    names = served_names or [model_name(Path(os.path.abspath(folder))) for folder in folders]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"served_model_name: two models would be called {duplicate!r}; give each a name of its own.",
            field="served_model_name",
        )
    return [[name] for name in names]


def _resident(
    folder: Path, names: Sequence[str], engine_config: EngineConfig, config: ServerConfig
) -> Resident:
    may_unload = _can_rest(engine_config)
    return Resident(folder, names, engine_config, keep_alive_s=config.keep_alive, may_unload=may_unload)


def _can_rest(engine_config: EngineConfig) -> bool:
    return CAN_RELEASE and pick_device(engine_config.device).type == "cpu"


def _arenas(models: int, engine_config: EngineConfig, config: ServerConfig) -> int:
    """Return how many models run at once; raise for CPU-only settings on other devices."""
    if _can_rest(engine_config):
        return min(config.arenas or 1, models)
    for field, is_set in (
        ("arenas", config.arenas is not None and config.arenas < models),
        ("weights_bytes", config.weights_bytes is not None),
        ("keep_alive", config.keep_alive >= 0),
    ):
        if is_set:
            raise ConfigError(
                f"{field}: models rest, and are unloaded, on a CPU under Linux alone; leave it out, and all "
                "run at once, each in an equal part of memory_bytes.",
                field=field,
            )
    return models


def _open(folder: Path, engine_config: EngineConfig) -> Resolved | SpecdecError:
    """Resolve a model's settings when alone, or return why it cannot run."""
    try:
        return open_model(folder, engine_config).settings
    except SpecdecError as error:
        return error


def _share(resolved: Resolved, left_bytes: int, *, arenas: int, models: int) -> EngineConfig:
    """Return a model's own configuration, with its share of given memory, or of what the weights leave."""
    config, device = resolved.config, resolved.device.type
    total = config.memory_bytes or int(AUTO_MEMORY_SHARE[device] * max(left_bytes, 0))
    memory_bytes = total // arenas if config.memory_bytes else min(total // arenas, resolved.memory_bytes)
    changes: dict[str, object] = {"memory_bytes": max(memory_bytes, 1)}
    if config.host_cache_bytes:
        changes["host_cache_bytes"] = max(config.host_cache_bytes // models, 1)
    return EngineConfig.of(config, changes)
