"""Token mixers, one file per kind: memory per sequence, cost, and execution."""

from specdec.models.mixers.attention import Attention
from specdec.models.mixers.base import ArenaViews, LoadedMixer, Mixer, MixerPlacement, Step
from specdec.models.mixers.gated_delta_net import GatedDeltaNet
from specdec.models.mixers.kda import KimiDeltaAttention
from specdec.models.mixers.latent_attention import LatentAttention
from specdec.models.mixers.lightning import Lightning
from specdec.models.mixers.mamba1 import Mamba1
from specdec.models.mixers.mamba2 import Mamba2
from specdec.models.mixers.shared_block import SharedBlock
from specdec.models.mixers.short_conv import ShortConv

__all__ = [
    "ArenaViews",
    "Attention",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LatentAttention",
    "Lightning",
    "LoadedMixer",
    "Mamba1",
    "Mamba2",
    "Mixer",
    "MixerPlacement",
    "SharedBlock",
    "ShortConv",
    "Step",
]
