"""Hand over a prompt between two engines by copying bytes, like a transfer backend."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec import SamplingParams, SpecEngine
from specdec.config.tenant import SOLE
from specdec.engine.incoming import IncomingPrefix
from specdec.engine.kv_transfer import LentPrefix

Copy = Callable[[SpecEngine, LentPrefix, SpecEngine, IncomingPrefix], None]
LIMIT_S = 60


def copy_blocks(
    reader: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix, *, since: int = 0
) -> int:
    """Copy the finished blocks from the `since`-th on; return the number of finished blocks."""
    there, here = reader.transfers.arena, writer.transfers.arena
    first = len(landing.shared)
    ready = lent.blocks[first:]
    for source, own in list(zip(ready, landing.blocks, strict=False))[since:]:
        here.block_bytes_X(own).copy_(there.block_bytes_X(source))
    return len(ready)


def copy_state(reader: SpecEngine, lent: LentPrefix, writer: SpecEngine, landing: IncomingPrefix) -> None:
    if lent.state is not None and landing.state is not None:
        own_X = writer.transfers.arena.state_bytes_X(landing.state)
        own_X.copy_(reader.transfers.arena.state_bytes_X(lent.state))


def transfer_prefix(
    reader: SpecEngine,
    writer: SpecEngine,
    prompt: Sequence[int],
    *,
    overlapped: bool = False,
    hidden: Callable[[Tensor | None], Tensor | None] = lambda own: own,
    copied: Copy | None = None,
) -> bool:
    """Prefill a prompt in one engine and cache it in another; return whether the transfer was accepted.

    `overlapped`: blocks are copied while later ones are prefilled. `hidden` and `copied` inject faults.
    """
    landing = writer.transfers.begin_landing(prompt[:-1], SOLE).result(LIMIT_S)
    if landing is None:
        return False
    # Earlier contents must not matter: these bytes are NaN in every dtype.
    for block in landing.blocks:
        writer.transfers.arena.block_bytes_X(block).fill_(0xFF)
    if landing.state is not None:
        writer.transfers.arena.state_bytes_X(landing.state).fill_(0xFF)
    done = 0

    def follow(lent: LentPrefix) -> None:
        nonlocal done
        if overlapped:
            done = copy_blocks(reader, lent, writer, landing, since=done)

    loan = reader.transfers.lend(reader.prepare(list(prompt), SamplingParams(max_tokens=1)), follow)
    lent = loan.done.result(LIMIT_S)
    assert lent.is_whole and lent.intact and lent.length == len(prompt) - 1
    copy_blocks(reader, lent, writer, landing, since=done)
    copy_state(reader, lent, writer, landing)
    if copied:
        copied(reader, lent, writer, landing)
    loan.give_back()
    assert writer.transfers.land(landing, hidden(lent.hidden_1D)).result(LIMIT_S)
    return True
