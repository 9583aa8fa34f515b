"""Where the bytes of a zip file's members are, for members that zip stores as they are.

References
----------
.. [1] PKWARE, ".ZIP File Format Specification" 6.3.10, 4.3.7 (local file header).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zipfile import ZipInfo

    from gpuload.source import FileSource

_HEADER, _HEADER_NBYTES, _LENGTHS_AT = b"PK\x03\x04", 30, 26
"""How a local header begins, its bytes before the member's name, and where in it the lengths are."""

_IS_UTF8 = 0x800
"""Flag of a member whose name is in UTF-8."""


def data_start(source: FileSource, info: ZipInfo) -> int | None:
    """Return the first byte of a member, after its local header; None if that is not where the directory says.

    The header has lengths of its own: the extra field in it may differ from the directory's.
    """
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _IS_UTF8 else "cp437")
    head = np.empty(_HEADER_NBYTES + len(name), dtype=np.uint8)
    is_whole = source.read_into(head, info.header_offset) == head.size
    raw = head.tobytes()
    if not is_whole or not raw.startswith(_HEADER) or raw[_HEADER_NBYTES:] != name:
        return None
    lengths: tuple[int, int] = struct.unpack_from("<HH", raw, _LENGTHS_AT)
    return info.header_offset + _HEADER_NBYTES + sum(lengths)
