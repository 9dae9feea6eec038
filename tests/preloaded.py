"""The imports of servers and their grammar processes: a test worker's fork server loads them once."""

import gc
import os
from contextlib import suppress

# transformers checks for CUDA on import: use NVML, or forks of this process could not use CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import tokenizers  # noqa: F401
from transformers import PreTrainedTokenizerFast  # noqa: F401

from specdec.cli import commands  # noqa: F401
from specdec.engine import engine  # noqa: F401
from specdec.server import run  # noqa: F401

with suppress(ImportError):  # a bare GPU machine has no llguidance
    from specdec.text.grammar import child  # noqa: F401

# Forks share the imports' memory until the collector writes to it.
gc.collect()
gc.freeze()
