"""specdec: an inference engine for hybrid language models whose core loop is speculative decoding."""

import os

# A CPU reads weights in huge pages a fifth faster. Torch looks at this once, at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import SpecEngine
from specdec.outputs import Completion, Delta

__all__ = ["Completion", "Delta", "EngineConfig", "SamplingParams", "SpecEngine"]
