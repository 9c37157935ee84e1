"""Huge pages for the weights on a CPU: a decode step streams all of them; 4 KiB pages cost it a fifth of its time."""

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

HUGE = 1 << 21  # bytes of a huge page on x86-64 and, with 4 KiB pages, on arm64
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1; older kernels collapse by and by


def use_huge_pages() -> int:
    """Asks the kernel to put this process's large anonymous memory, as it is now, on huge pages; bytes asked for.

    A kernel that cannot, or may not, leaves all as it is. Call before memory is mapped that is to stay untouched:
    collapsing fills it.
    """
    asked = 0
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in _large_anonymous(Path("/proc/self/maps").read_text()):
            if libc.madvise(start, end - start, MADV_HUGEPAGE) == 0:
                libc.madvise(start, end - start, MADV_COLLAPSE)
                asked += end - start
    log.debug("%d MiB on huge pages", asked >> 20)
    return asked


def _large_anonymous(maps: str) -> Iterator[tuple[int, int]]:
    """Whole huge pages within private, writable mappings of no file: (first byte, byte after the last)."""
    for line in maps.splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        low, high = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-low // HUGE) * HUGE, high // HUGE * HUGE
        if end > start:
            yield start, end
