"""Release pages of memory to the system without unmapping them."""

import ctypes
import mmap
import os
import sys

from torch import Tensor

CAN_RELEASE = sys.platform == "linux"
"""True if released pages are free at once and read as zeros when accessed again."""


def release_heap() -> None:
    """Return freed heap memory to the system, such as an unloaded model's weights.

    Does nothing for C libraries other than glibc.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def release_pages(data: Tensor) -> None:
    """Free the pages of a host tensor; its address stays valid and reads as zeros.

    Stored addresses, such as a tape's, stay usable: the next access allocates a page. Bytes that share a page
    with other data stay in memory, and are set to zero.
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
            raise OSError(error, f"memory cannot be released: {os.strerror(error)}")
    bytes_X[:first].zero_()
    bytes_X[first + count :].zero_()
