"""What is said of a chunk that is wrong, whichever backend finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuload.backends.native import chunks, inflate
from gpuload.errors import CorruptDataError

if TYPE_CHECKING:
    from gpuload.types import ArrayRead


def reason(code: int) -> str:
    """Return what a code of the native decoders and the kernels means, as a part of a sentence."""
    return chunks.describe(code) if code <= chunks.BAD_SIZE else inflate.describe(code)


def corrupt(read: ArrayRead, chunk: int, why: str) -> CorruptDataError:
    """Return the error for chunk `chunk` of a read."""
    layout = read.layout
    return CorruptDataError(
        f"{layout.source.name}: chunk {int(read.chunk_id[chunk])} of {layout.name} at byte "
        f"{int(read.chunk_offset[chunk])} is damaged: {why}. Restore the file from its source."
    )


def rounding_warning(read: ArrayRead) -> str:
    """Return the sentence that says, once, that float32 rounds what a file holds."""
    return f"{read.layout.source.name}: {read.layout.name} holds integers above 2**24, which float32 rounds"
