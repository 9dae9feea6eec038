"""Log-probabilities under the raw logits, for all rows of a step at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from specdec.kernels.sampling.cpu import ranked

ID_BYTES = 4


class TopTokens(Sequence[tuple[int, float]]):
    """The likeliest tokens at one position with their log-probabilities, likeliest first.

    Packed, because an answer may hold millions: as tuples of Python numbers they take twelve times as much.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, data: bytes, count: int) -> None:
        """Store `count` int32 ids, followed by the log-probabilities as float32 or float64."""
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[int, float]]:
        data, split = memoryview(self._data), ID_BYTES * self._count
        values = data[split:].cast("f" if len(data) == 2 * split else "d")
        return zip(data[:split].cast("i"), values, strict=True)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[tuple[int, float], ...]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | tuple[tuple[int, float], ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Logprob(NamedTuple):
    """Log-probabilities of the chosen and the likeliest tokens."""

    chosen: float
    top: Sequence[tuple[int, float]]


def logprobs_of(logits_NV: Tensor, tokens: Sequence[int], wanted: Sequence[int]) -> list[Logprob]:
    """Return each row's log-probabilities; ties are ordered by token id."""
    dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    logprobs_NV = logits_NV.log_softmax(-1, dtype=dtype)
    token_N1 = torch.tensor(tokens, device=logits_NV.device)[:, None]
    chosen: list[float] = logprobs_NV.gather(1, token_N1)[:, 0].tolist()
    if not any(wanted):
        return [Logprob(logprob, ()) for logprob in chosen]
    value_NC, token_NC = ranked(logprobs_NV, max(wanted))
    width, size = token_NC.shape[1], dtype.itemsize
    ids = token_NC.int().cpu().numpy().tobytes()
    values = value_NC.cpu().numpy().tobytes()
    results = []
    for n, (logprob, count) in enumerate(zip(chosen, wanted, strict=True)):
        first, last = n * width, n * width + min(count, width)
        data = ids[ID_BYTES * first : ID_BYTES * last] + values[size * first : size * last]
        results.append(Logprob(logprob, TopTokens(data, last - first) if count else ()))
    return results
