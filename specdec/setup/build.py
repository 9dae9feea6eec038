"""Build an engine from a model folder and a configuration."""

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.core.device.device_batch import DeviceBatch
from specdec.core.device.drafting import DeviceDrafter
from specdec.core.device.extent import Extent
from specdec.core.device.graphs import Graphs
from specdec.core.device.pack import Packer
from specdec.core.device.rows import BatchRows
from specdec.core.device.runner import DeviceDraftRunner, HostDraftRunner, Runner, RunnerHost
from specdec.core.device.step import DeviceStep
from specdec.core.device.steps import Steps
from specdec.core.device.taped import TapedSteps
from specdec.core.engine_core import EngineCore
from specdec.core.executor import LocalExecutor
from specdec.core.loop import DecodeLoop
from specdec.core.parallel.executor import LeaderExecutor
from specdec.core.parallel.group import LeaderGroup
from specdec.core.scheduler import Scheduler
from specdec.core.speculation import Speculation
from specdec.draft.head import DraftHead
from specdec.draft.policy import Policy
from specdec.draft.rounded import QuantisedCopy
from specdec.draft.uniform import UniformPolicy
from specdec.errors import CapacityError, ConfigError
from specdec.kernels.native.instruction_sets import describe_kernels
from specdec.kernels.native.threads import without_helpers
from specdec.kernels.table import load_kernels, on_gpu
from specdec.models import spec
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.families import open_weights, stored_format
from specdec.models.formats import FORMATS, WeightFormat
from specdec.models.heads import HeadSource, load_head
from specdec.models.network import Network
from specdec.models.rounded import CopiedWeights
from specdec.models.shards import ShardedWeights, shard_network
from specdec.models.weights import RandomWeights, Weights
from specdec.models.work import ReadingWork
from specdec.setup.drafters import DRAFTERS, DrafterContext, find_heads, has_copy, head_of
from specdec.setup.footprint import token_work
from specdec.setup.precompile import precompile
from specdec.setup.ranks import start_ranks, wait_for_ranks
from specdec.setup.resolve import open_model, resolve
from specdec.setup.settings import Resolved
from specdec.setup.warmup import warm_up
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.score import Score
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tuner import Tuner
from specdec.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with its memory and loop."""

    core: EngineCore
    network: Network
    tokenizer: Tokenizer | None
    settings: Resolved

    @property
    def loop(self) -> DecodeLoop:
        return self.core.loop

    @property
    def drafting(self) -> str:
        """The drafters, and whether a missing head is why there are no others."""
        names = " and ".join(self.settings.drafters) or "none"
        has_reason = self.settings.drafters and self.loop.speculation.head is None
        return f"{names}; the model has no draft head (MTP, EAGLE or block)" if has_reason else names


def build(folder: str | Path, config: EngineConfig) -> LoadedModel:
    """Load a checkpoint, resolve "auto" settings, allocate memory, and build the loop."""
    opened = open_model(folder, config)
    checkpoint, network_spec, settings = opened.checkpoint, opened.network, opened.settings
    tokenizer = load_tokenizer(checkpoint.folder)
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    weights = open_weights(
        checkpoint,
        network_spec,
        dtype=settings.dtype,
        device=settings.device,
        mtp=opened.head is not None and opened.head.checkpoint is None,
        quantize=_format(settings),
    )
    stored = stored_format(checkpoint.config)
    if stored and stored.packed and stored.packed.note and settings.weights:
        logger.info("%s: %s", stored.name, stored.packed.note)
    if narrower := settings.quantize or (stored and stored.name):
        is_kept = settings.weights is not None
        form = "used as stored, or widened" if on_gpu(settings.kernels) else "used as stored"
        form = form if is_kept else f"widened to {settings.dtype}, as these kernels need them"
        logger.log(logging.INFO if is_kept else logging.WARNING, "%s weights: %s", narrower, form)
    group = start_ranks(checkpoint.folder, network_spec, settings) if settings.config.tp > 1 else None
    try:
        return _load(network_spec, weights, tokenizer, settings, opened.head, opened.shortlist_C, group)
    except BaseException:
        if group:
            group.close()
        raise


def build_random(
    network_spec: spec.NetworkSpec, config: EngineConfig, *, stored: torch.dtype, stored_bytes: int, seed: int
) -> LoadedModel:
    """Build a model with random weights, generated on the device, and without a tokenizer.

    `stored` and `stored_bytes` are the dtype and size that a checkpoint of this network would have.
    """
    if config.tp > 1:
        raise ConfigError("tp: random weights are on one rank only; use tp=1, or a checkpoint.", field="tp")
    heads = find_heads(None, network_spec, config)
    settings = resolve(config, network_spec, stored, stored_bytes, heads=heads)
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    weights = RandomWeights(
        *(seed, settings.dtype, settings.device),
        norm_offset=network_spec.norm.offset,
        quantize=_format(settings),
    )
    # With random weights no token is more frequent than another.
    shortlist_C = torch.arange(min(config.draft_vocab, network_spec.vocab)) if config.draft_vocab else None
    return _load(network_spec, weights, None, settings, head_of(settings.drafters, heads), shortlist_C)


def _format(settings: Resolved) -> WeightFormat | None:
    """Return the format that large matrices are quantised to at load, or None."""
    return FORMATS[settings.quantize] if settings.quantize else None


def _load(
    network_spec: spec.NetworkSpec,
    weights: CheckpointWeights | RandomWeights,
    tokenizer: Tokenizer | None,
    settings: Resolved,
    source: HeadSource | None,
    shortlist_C: Tensor | None,
    group: LeaderGroup | None = None,
) -> LoadedModel:
    """Load the network and its draft head or copy, and build the loop.

    Of a group, this process loads its share, and the whole head, which only rank 0 runs.
    """
    target: Weights = weights
    if group:
        network_spec, cuts = shard_network(network_spec, group.ranks)
        target = ShardedWeights(weights, cuts, group)
    copied = CopiedWeights(weights) if has_copy(settings.drafters) else None
    is_packed = isinstance(weights, CheckpointWeights) and weights.is_packed
    with without_helpers() if is_packed else nullcontext():
        network = Network(
            network_spec,
            copied or target,
            load_kernels(settings.kernels),
            max_length=settings.max_model_len,
            device=settings.device,
            shortlist_C=shortlist_C,
            shard=group,
        )
    head: DraftHead | None = None
    if source:
        head = load_head(
            source,
            network,
            weights,
            max_length=settings.max_model_len,
            dtype=settings.dtype,
            device=settings.device,
            quantize=_format(settings),
        )
    weights.finish()
    copy = copied.copy(network) if copied else None
    logger.info("kernels: %s", describe_kernels(settings.kernels))
    if group:
        wait_for_ranks(group)
    core = assemble(network, head, settings, copy=copy, group=group)
    model = LoadedModel(core, network, tokenizer, settings)
    logger.info("drafters: %s", model.drafting)
    return model


def assemble(
    network: Network,
    head: DraftHead | None,
    settings: Resolved,
    *,
    copy: QuantisedCopy | None = None,
    group: LeaderGroup | None = None,
) -> EngineCore:
    """Build the loop around a loaded network, and measure the cost of its steps.

    `head` or `copy` draft, if given; the ranks of `group` run the same steps.
    """
    arena = Arena(settings.layout, settings.memory_bytes, settings.device)
    executor = LocalExecutor(network, arena, settings.device)
    if group:
        executor = LeaderExecutor(network, arena, settings.device, group)
    # Waiting for a CPU does not count as step cost, but waiting for other ranks or a GPU does.
    clock = time.thread_time if settings.device.type == "cpu" and not group else time.perf_counter
    scheduler = Scheduler(
        arena,
        executor,
        max_running=settings.config.max_running,
        chunk_tokens=settings.config.chunk_tokens,
        work=ReadingWork.of(network.spec),
    )
    policy = Policy(
        settings.bounds,
        adaptive=settings.config.adaptive,
        mixed=not settings.graphs
        or settings.kernels == "native",  # captured windows are padded to the widest
        work=token_work(network.spec),
        clock=clock,
    )
    speculation = Speculation(
        policy,
        BACKINGS[settings.config.slots](arena),
        scheduler,
        network.kernels,
        synthetic=settings.synthetic,
        noise=settings.config.draft_noise,
        learns=bool(settings.drafters) and settings.config.adaptive,
        clock=clock,
    )
    for name in settings.drafters:
        speculation.add_drafter(DRAFTERS[name].make(DrafterContext(head, copy, arena, speculation, settings)))
    loop = DecodeLoop(executor, arena, scheduler, speculation)
    core = EngineCore(loop, vocab=network.spec.vocab, eos=network.spec.eos, max_length=settings.max_model_len)
    if on_gpu(settings.kernels) and settings.device.type == "cuda":
        precompile(loop, network, settings.max_model_len)
    if speculation.learns:
        warm_up(core)
    if settings.graphs:
        runner = _runner(loop, network, settings)
        if runner:
            loop.run_on_device(runner)
    if settings.config.prefix_cache:  # after the warm-up, whose text must not be cached
        cache = _prefix_cache(arena, network, settings, has_head=head is not None)
        loop.keep_prefixes(cache, _tuner(cache.score, settings, has_head=head is not None))
    return core


def _prefix_cache(arena: Arena, network: Network, settings: Resolved, *, has_head: bool) -> PrefixCache:
    """Build the prefix cache over an arena, with a lower tier in host memory if configured."""
    work, lower = ReadingWork.of(network.spec), None
    if settings.config.host_cache_bytes:
        try:
            below = Arena(
                settings.layout,
                settings.config.host_cache_bytes,
                torch.device("cpu"),
                pinned=settings.device.type == "cuda",
            )
        except CapacityError as error:
            message = str(error).replace("memory_bytes", "host_cache_bytes")
            raise CapacityError(message, field="host_cache_bytes") from None
        lower = Tier(below, Score(settings.layout, work), has_head=has_head)
    score = Score(settings.layout, work, settings.prefix_alpha)
    return PrefixCache(arena, score, has_head=has_head, lower=lower)


def _tuner(score: Score, settings: Resolved, *, has_head: bool) -> Tuner | None:
    """Build the tuner of the eviction weight, unless it is fixed or has no effect."""
    layout = settings.layout
    if settings.config.prefix_policy != "tuned" or not (layout.states and layout.kv):
        return None

    def change(alpha: float) -> None:
        logger.info("tuned prefix_alpha: %g", alpha)
        score.alpha = alpha

    return Tuner(layout, settings.memory_bytes, score.work, has_head=has_head, on_change=change)


def _runner(loop: DecodeLoop, network: Network, settings: Resolved) -> Runner | None:
    """Build the runner of device steps: heads draft on the device, other drafters on the host.

    Return None if a CPU's steps cannot be taped and `graphs` was not requested.
    """
    head, arena, kernels = loop.speculation.head, loop.arena, network.kernels
    drafts = not settings.drafters or any(DRAFTERS[name].runs_on_device for name in settings.drafters)
    drafts_on_host = not all(DRAFTERS[name].runs_on_device for name in settings.drafters)
    is_free = on_gpu(settings.kernels)
    size = settings.layout.block_tokens
    # The C kernels read row lengths themselves; with an 8-bit KV cache torch reads them on the host.
    looks_up = settings.kernels == "native" and settings.layout.page_dtype == settings.dtype
    pack = Packer(
        kernels,
        settings.layout.conv_width,
        settings.max_model_len,
        asks=not (is_free or looks_up),
        block_tokens=size,
    )
    drafter = None
    if head and drafts:
        shared, table = (kernels, arena, pack), head.calibrator.table()
        noise = settings.config.draft_noise
        drafter = DeviceDrafter(head.head, *shared, table, window=head.window, noise=noise)
    snapshots = settings.config.slots == "snapshot"
    step = DeviceStep(network, drafter, arena, pack, snapshots=snapshots, rates=settings.synthetic)
    bounds = settings.bounds if settings.drafters else None
    written = head.written(bounds) if head and bounds else 0
    extent = Extent.of(settings.config.max_running, bounds, looks=drafts_on_host, written=written)
    make_rows = partial(
        BatchRows.empty,
        extent,
        blocks=max(settings.layout.blocks_for(settings.max_model_len + extent.ahead), 1),
        hidden=head.head.width if head else network.spec.hidden,
        dtype=settings.dtype,
        device=settings.device,
    )
    rows = make_rows()
    graphs = Graphs(step, rows, make_rows) if is_free and settings.device.type == "cuda" else None
    taped = TapedSteps(step, rows) if settings.kernels == "native" else None
    steps = graphs or taped or Steps(step, rows)
    batch = DeviceBatch(step, rows, extent, steps, arena, loop.scheduler, head if drafts else None)
    host = RunnerHost(loop.scheduler, loop.speculation, lambda: loop.counts, loop.commit_and_emit)
    runner: Runner = HostDraftRunner(batch, host)
    if drafts:
        policy = UniformPolicy(bounds, adaptive=settings.config.adaptive)
        runner = DeviceDraftRunner(batch, host, policy, lazy=settings.device.type == "cpu")
    if graphs:
        graphs.capture(runner.graph_keys())
    if taped and not taped.plan(runner.graph_keys()) and settings.config.graphs is None:
        return None
    return runner
