"""Release pages of memory to the system and keep their addresses."""

import ctypes
import mmap
import os
import sys

from torch import Tensor

CAN_RELEASE = sys.platform == "linux"
"""Whether released pages are free at once and read as zeros when touched again."""


def release_heap() -> None:
    """Make the C library give freed memory back to the system: most of an unloaded model's weights.

    Another library than glibc is left alone.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def release_pages(data: Tensor) -> None:
    """Free the pages of a host tensor; its address stays valid and reads as zeros.

    Whatever has noted its address, as a tape has, may go on using it: the next access takes a page anew.
    Bytes that share their page with something else stay in memory, and are set to zero.
    """
    assert CAN_RELEASE and data.device.type == "cpu" and data.is_contiguous()
    bytes_X, page = data.view(-1), mmap.PAGESIZE
    first = -data.data_ptr() % page
    count = max(data.nbytes - first, 0) // page * page
    if count:
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.c_void_p(data.data_ptr() + first)
        if libc.madvise(start, ctypes.c_size_t(count), mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"memory cannot be given back: {os.strerror(error)}")
    bytes_X[:first].zero_()
    bytes_X[first + count :].zero_()
