"""The C library's allocator."""

import ctypes
from contextlib import suppress

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_SIZE = 2**20


def give_back_freed_memory() -> None:
    """Let every block of a megabyte or more be mapped by itself, so that it goes back to the system when it
    is freed.

    Otherwise glibc keeps freed blocks of up to 32 MB, and what lies between them: at 0.6 billion parameters a
    quarter of the peak. For small models its way is the faster one. Where the C library is another, nothing
    happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, _SIZE)
