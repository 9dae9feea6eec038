"""Cutting rows and lists of descriptors covers every byte once, in order, whatever the sizes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.reach.carrier import Indices
from specdec.reach.descriptors import DESCRIPTOR_BYTES, Descriptors, pieces

SIZES = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 5)), min_size=1, max_size=4)


def strided(sizes: list[tuple[int, int]], gap: int) -> NDArray[np.int64]:
    found, base = [], 1000
    for length, count in sizes:
        found.append((base, length, 0, length + gap, count))
        base += (length + gap) * count
    return np.array(found, dtype=np.int64)


def expand(rows: NDArray[np.int64]) -> list[range]:
    """List the addresses of each descriptor as NIXL counts them."""
    return [
        range(a + k * stride, a + k * stride + n)
        for a, n, _, stride, count in rows.tolist()
        for k in range(count)
    ]


@given(SIZES, st.integers(0, 9), st.integers(1, 40), st.randoms(use_true_random=False))
def test_parts_of_descriptors_are_their_bytes_in_order(sizes, gap, piece_bytes, random) -> None:  # type: ignore[no-untyped-def]
    rows = strided(sizes, gap)
    whole, cut = expand(rows), Descriptors(rows, piece_bytes)
    parts = expand(cut.rows)
    indices = np.array([random.randrange(len(whole)) for _ in range(6)], dtype=np.int32)
    found, lengths = cut.cut(indices)
    assert [b for i in found for b in parts[i]] == [b for i in indices for b in whole[i]]
    assert lengths.tolist() == [len(parts[i]) for i in found]
    assert lengths.max() <= piece_bytes
    assert found.dtype == np.int32
    assert cut.lengths(indices).tolist() == [len(whole[i]) for i in indices]
    assert len(cut) == len(whole)
    assert cut.rows[:, 4].sum() == len(parts)


def test_given_rows_are_not_modified() -> None:
    rows = strided([(100, 2)], 0)
    before = rows.copy()
    Descriptors(rows, 30)
    assert (rows == before).all()


def sizes_of(cut: list[Indices], here: Descriptors) -> list[int]:
    lengths = np.repeat(here.rows[:, 1], here.rows[:, 4])
    return [int(lengths[local].sum()) for local, _ in cut]


@given(SIZES, st.integers(1, 12))
def test_pieces_of_a_read_are_all_of_it_once(sizes, times) -> None:  # type: ignore[no-untyped-def]
    piece_bytes = 2 * DESCRIPTOR_BYTES
    here = Descriptors(strided(sizes, 0), piece_bytes)
    there = Descriptors(strided(sizes, 3), piece_bytes)
    indices = np.tile(np.arange(len(here), dtype=np.int32), times)
    cut = list(pieces(here, there, (indices, indices)))
    assert np.concatenate([local for local, _ in cut]).tolist() == indices.tolist()
    assert np.concatenate([remote for _, remote in cut]).tolist() == indices.tolist()
    assert max(len(local) for local, _ in cut) <= 2  # the number of small descriptors is bounded


def test_pieces_are_bounded_in_bytes() -> None:
    whole = Descriptors(np.array([(0, 1 << 20, 0, 1 << 20, 64)], dtype=np.int64), 8 << 20)
    indices = np.arange(64, dtype=np.int32)
    sizes = sizes_of(list(pieces(whole, whole, (indices, indices))), whole)
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 8 << 20
    assert len(sizes) <= 10


def test_a_large_descriptor_is_several_pieces() -> None:
    whole = Descriptors(np.array([(0, 77_000_000, 0, 80_000_000, 3)], dtype=np.int64), 8 << 20)
    one = np.array([1], dtype=np.int32)
    sizes = sizes_of(list(pieces(whole, whole, (one, one))), whole)
    assert len(sizes) == 10 and sum(sizes) == 77_000_000


def test_no_descriptors_are_no_pieces() -> None:
    whole = Descriptors(strided([(5, 2)], 0))
    none = np.array([], dtype=np.int32)
    assert list(pieces(whole, whole, (none, none))) == []
    assert whole.holds(none)


def test_indices_out_of_range_are_known() -> None:
    whole = Descriptors(strided([(5, 2), (7, 3)], 0))
    assert whole.holds(np.array([0, 4], dtype=np.int32))
    assert not whole.holds(np.array([5], dtype=np.int32))
    assert not whole.holds(np.array([-1], dtype=np.int32))
