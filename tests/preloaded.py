"""What servers and their grammar processes import: the fork server of a test worker loads it once."""

import gc
import os
from contextlib import suppress

# xgrammar looks for CUDA while it is imported: by NVML, or forks of this process could not use CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import tokenizers  # noqa: F401
from transformers import PreTrainedTokenizerFast  # noqa: F401

from specdec.cli import commands  # noqa: F401
from specdec.engine import engine  # noqa: F401
from specdec.server import run  # noqa: F401
from specdec.text.grammar import child  # noqa: F401

with suppress(ImportError):
    import xgrammar  # noqa: F401

# The forks share the memory of what was imported for as long as the collector does not write to it.
gc.collect()
gc.freeze()
