"""What servers and their grammar processes import: the fork server of a test worker loads it once."""

import gc
from contextlib import suppress

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
