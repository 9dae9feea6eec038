"""One engine per drafting setting over shared weights: side by side, or in turn if memory is short."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.bench.acceptance.settings import NETWORKS, TRANSFORMERS, Drafting, widest
from specdec.config.drafters import AUTO, NONE, drafters_of_folders
from specdec.config.engine import EngineConfig
from specdec.draft.head import DraftHead, HeadDrafter
from specdec.draft.rounded import QuantisedCopy, RoundedDrafter
from specdec.errors import ConfigError
from specdec.models.network import Network
from specdec.setup.build import LoadedModel, assemble, build
from specdec.setup.devices import free_memory
from specdec.setup.settings import Resolved
from specdec.text.tokenizer import Tokenizer

SHARE = 0.5
"""Default share of free memory for engines, beside the weights."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """Weights with a drafter, and settings large enough for every requested shape."""

    draft: str
    vocab: int | None
    network: Network
    head: DraftHead | None
    copy: QuantisedCopy | None
    tokenizer: Tokenizer | None
    settings: Resolved


class EngineCache:
    """Own the weights and as many engines as fit in memory; the least recently used one is evicted.

    A rebuilt engine shares the weights, and measures its step costs again.
    """

    def __init__(
        self, folder: Path, config: EngineConfig, draftings: Sequence[Drafting], memory: int | None
    ) -> None:
        """Load the weights for every drafter; `config` holds the other settings."""
        self.left_out: list[str] = []
        """Drafters that cannot run here, and why."""
        self._loaded: list[LoadedDrafter] = []
        running = [own for own in draftings if own.draft in NETWORKS]
        for own in sorted(running, key=lambda own: NETWORKS.index(own.draft)):
            if not self._donor(own):
                self._load(folder, config, own, draftings)
        if not self._loaded:
            looked_up = next((d for d in draftings if d.draft not in NETWORKS), Drafting(NONE))
            self._load(folder, config, looked_up, draftings)
        self.draftings = [d for d in draftings if self._donor(d)]
        for idle in [d for d in self.draftings if d.window and not self._has_head(d)]:
            self._leave_out(f"{idle.name}: only a head has a use for a window")
            self.draftings.remove(idle)
        budget = memory or int(SHARE * free_memory(self.first.settings.device))
        self.most = max(1, budget // max(own.settings.memory_bytes for own in self._loaded))
        """Maximum number of engines."""
        self._open: OrderedDict[Drafting, LoadedModel] = OrderedDict()

    @property
    def first(self) -> LoadedDrafter:
        """Return the drafter-independent part: network, tokenizer, device and dtype."""
        return self._loaded[0]

    def open(self, drafting: Drafting) -> LoadedModel:
        """Return an engine, assembling it if needed."""
        if drafting not in self._open:
            while len(self._open) >= self.most:
                self._open.popitem(last=False)
            self._open[drafting] = self._assemble(drafting)
        self._open.move_to_end(drafting)
        return self._open[drafting]

    def _load(
        self, folder: Path, config: EngineConfig, asked: Drafting, draftings: Sequence[Drafting]
    ) -> None:
        """Load the weights and a head; a drafter without a head is left out."""
        draft = asked.draft
        own_head = config.draft_model if draft in (AUTO, *drafters_of_folders()) else None
        fields = {**widest(draftings, draft), "adaptive": False, "draft_model": own_head}
        fields |= {"draft_vocab": asked.vocab} if asked.vocab else {}
        try:
            model = build(folder, EngineConfig.of(config, fields))
        except ConfigError as error:
            missing = ("draft", "draft_model", *(["draft_vocab"] if asked.vocab else []))
            if draft == NONE or error.field not in missing:
                raise
            return self._leave_out(f"{draft} of {asked.vocab} tokens: {error}" if asked.vocab else str(error))
        planned = model.loop.speculation.planned
        own = LoadedDrafter(
            *(draft, asked.vocab, model.network),
            head=planned.head if isinstance(planned, HeadDrafter) else None,
            copy=planned.copy if isinstance(planned, RoundedDrafter) else None,
            tokenizer=model.tokenizer,
            settings=model.settings,
        )
        self._loaded.append(own)

    def _leave_out(self, why: str) -> None:
        if why not in self.left_out:
            self.left_out.append(why)

    def _has_head(self, asked: Drafting) -> bool:
        donor = self._donor(asked)
        return donor is not None and donor.head is not None

    def _donor(self, asked: Drafting) -> LoadedDrafter | None:
        """Return the loaded weights with a drafter's head; the first for a drafter without weights."""
        if asked.draft not in NETWORKS:
            return self.first
        alike = (own for own in self._loaded if own.vocab == asked.vocab)
        return next((own for own in alike if asked.draft in (*own.settings.drafters, own.draft)), None)

    def _assemble(self, drafting: Drafting) -> LoadedModel:
        donor = self._donor(drafting)
        assert donor is not None and drafting.draft != TRANSFORMERS
        drafters = {NONE: (), AUTO: donor.settings.drafters}.get(drafting.draft, (drafting.draft,))
        settings = replace(
            donor.settings,
            drafters=drafters,
            bounds=drafting.shape or donor.settings.bounds,
            config=donor.settings.config.model_copy(
                update={
                    "adaptive": drafting.chosen,
                    "draft_noise": drafting.noise,
                    "draft_window": drafting.window,
                }
            ),
        )
        head, copy = (donor.head, donor.copy) if drafting.draft in NETWORKS else (None, None)
        core = assemble(donor.network, head, settings, copy=copy)
        core.warm_up()
        return LoadedModel(core, donor.network, donor.tokenizer, settings)
