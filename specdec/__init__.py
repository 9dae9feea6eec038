"""specdec: an inference engine for hybrid language models whose core loop is speculative decoding."""

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import SpecEngine
from specdec.outputs import Completion, Delta

__all__ = ["Completion", "Delta", "EngineConfig", "SamplingParams", "SpecEngine"]
