"""The C library's allocator."""

import ctypes
from contextlib import suppress

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_SIZE = 2**20
"""Bytes from which on a block is mapped by itself."""


def give_back_freed_memory() -> None:
    """Make glibc map every block of a megabyte or more by itself, so that it goes back to the system when it
    is freed.

    Otherwise glibc keeps freed blocks of up to 32 MB, and the gaps between them: at 0.6 billion parameters a
    quarter of the peak. For small models keeping them is faster. With another C library this does nothing.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, _SIZE)
