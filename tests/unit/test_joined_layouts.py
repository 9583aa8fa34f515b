"""The layouts of each file's arrays, once they share the tables of joined ones, say the same as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from gpuload.joined import join_files
from gpuload.layout import ArrayLayout, Filter
from gpuload.source import FileSource

if TYPE_CHECKING:
    from pathlib import Path

TABLES = ("chunk_offset", "chunk_nbytes", "chunk_mask", "verified")


def layout_of(path: Path, name: str, n: int, length: int, level: int, *, is_chunked: bool = True) -> ArrayLayout:
    n_chunks = -(-n // length)
    path.write_bytes(bytes(100 * n_chunks))
    nbytes = np.arange(1, n_chunks + 1)
    return ArrayLayout(
        FileSource(str(path)),
        name,
        (n,),
        np.dtype("<f4"),
        (length,),
        100 * np.arange(n_chunks),
        nbytes,
        np.arange(n_chunks, dtype=np.uint32) % 2,
        (Filter("deflate", (level,)),),
        is_chunked=is_chunked,
    )


@pytest.mark.parametrize("lengths", [(10, 10, 10), (10, 7, 30)])
def test_joined_layouts_are_like_those_of_their_files(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    names = ("/a/X/data", "/b/X/data", "/raw/X/data")
    sizes = (35, 42, 60)
    layouts = [layout_of(tmp_path / str(k), names[k], sizes[k], lengths[k], 4 + k, is_chunked=k < 2) for k in range(3)]
    joined, parts = join_files([(layout,) for layout in layouts])
    ((array,),) = joined.groups
    base = array.layout.source.base.tolist()
    first = 0
    for k, (layout, (part,)) in enumerate(zip(layouts, parts, strict=True)):
        assert (part.shape, part.chunk_shape, part.filters) == (
            (sizes[k],),
            (lengths[k],),
            (Filter("deflate", (4 + k,)),),
        )
        assert part.is_chunked == (k < 2)
        assert part.edges is None
        n_chunks = -(-sizes[k] // lengths[k])
        assert part.chunk_offset.tolist() == [base[k] + 100 * chunk for chunk in range(n_chunks)]
        assert part.chunk_nbytes.tolist() == list(range(1, n_chunks + 1))
        assert part.chunk_mask.tolist() == [chunk % 2 for chunk in range(n_chunks)]
        assert [part.number_in_file(chunk) for chunk in range(n_chunks)] == list(range(n_chunks))
        assert [array.layout.number_in_file(first + chunk) for chunk in range(n_chunks)] == list(range(n_chunks))
        assert all(np.shares_memory(getattr(part, table), getattr(array.layout, table)) for table in TABLES)
        wide = layout.with_dest_stride(3)
        wide.verified[0] = 1
        assert layout.verified[0] == 1
        first += n_chunks
    assert array.layout.name == "X/data"
    for layout in layouts:
        layout.source.close()
