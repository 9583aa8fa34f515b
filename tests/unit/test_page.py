"""The benchmark's page: self-contained, with every figure, whatever the figures and names are."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

from gpuload.cli import page


def stage(share: float, rate: float, ceiling: float) -> dict[str, float]:
    return {"thread_share": share, "bytes_per_s": rate, "ceiling_bytes_per_s": ceiling, "fraction": rate / ceiling}


def result(**changes: Any) -> dict[str, Any]:
    """Return the result of a benchmark, with figures that are all different."""
    nothing = stage(0.04, math.nan, math.nan)
    return {
        "paths": ["a<b>.h5ad"],
        "device": "cpu",
        "io_mode": "posix",
        "n_vars": 62710,
        "batch_size": 64,
        "first_batch_s": 1.25,
        "cells_per_s": {"median": 51324.0, "min": 32789.0, "max": 72440.0, "repeats": [51324.0, 72440.0, 32789.0]},
        "stages": {
            "plan": nothing,
            "read": stage(0.2, 2.0e9, 6.25e9),
            "decode": stage(1.42, 5.04e8, 2.21e8),
            "take_rows": nothing,
            "wait": stage(0.91, math.nan, math.nan),
            "at_ceilings_cells_per_s": 26497.0,
            "fraction_of_ceilings": 0.5,
            "chunks_kept": 0.375,
        },
        "waits_s": {"p50_s": 0.0012, "p95_s": 0.0025, "p99_s": 0.0101},
        "entropy_bits": {"mean": 3.536, "sd": 0.1, "true_random": 3.623},
        "label": "plate & donor",
        "peak_memory_nbytes": 888e6,
        "memory_parts_nbytes": {"residents": 35_000_000, "minibatches": 179_000_000},
        **changes,
    }


class Balanced(HTMLParser):
    """Raises when an element is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> str:
    """Return the page's text; the page must be well-formed, and refer to nothing outside itself."""
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    assert not re.search(r"https?:|<script|<link|url\(|nan", text)
    return re.sub(r"<[^>]*>", " ", text)


def test_the_page_shows_all_figures() -> None:
    words = check(page.page(result(verdict="decode-bound: a < b"), {"torch": "2.13.0"}))
    for expected in (
        "a&lt;b&gt;.h5ad",
        "decode-bound: a &lt; b",
        "51,324",
        "(32,789 to 72,440)",
        "50 %",
        "of 26,497 cells/s",
        "3.536 bits",
        "plate &amp; donor in a minibatch; true random 3.623",
        "1.25 s",
        "1.20 ms",
        "p50 1.20, p95 2.50, p99 10.10 ms",
        "888 MB",
        "2.0 GB/s, 32 % of 6.2 GB/s",
        "504 MB/s, 228 % of 221 MB/s",
        "no rate here",
        "38 %",
        "of chunks were kept by an earlier epoch",
        "round 3",
        "72,440 cells/s",
        "residents: 35.0 MB",
        "Python and its packages: 674 MB",
        "62710",
        "2.13.0",
    ):
        assert expected in words, expected


def test_the_page_explains_the_ceilings() -> None:
    words = check(page.page(result(), {}))
    assert "so both may be above 100 %" in words


def test_missing_label_verdict_and_ceilings_are_left_out() -> None:
    nothing = {"fraction_of_ceilings": math.nan, "at_ceilings_cells_per_s": math.nan}
    text = page.page(result(entropy_bits=None, label=None, stages={**result()["stages"], **nothing}), {})
    words = check(text)
    assert "bits" not in words
    assert "all stages at their ceilings" not in words
    assert "<img" not in text


def test_gpus_are_shown_if_there_are_any() -> None:
    assert "GPU" not in check(page.page(result(), {}))
    gpu = {"name": "GPU 3", "mean_percent": 61.8, "idle_share": 0.1, "n_samples": 30}
    words = check(page.page(result(gpus=[gpu]), {}))
    assert "62 %" in words
    assert "GPU 3 busy, mean" in words


def test_a_gpu_page_has_no_ceilings_or_host_memory() -> None:
    words = check(page.page(result(device="cuda:0"), {}))
    assert "Stages against their ceilings" not in words
    assert "launch the work of the GPU" in words
    assert "Python and its packages" not in words


def test_the_timeline_is_part_of_the_page() -> None:
    text = page.page(result(), {}, b"\x89PNG")
    check(text)
    assert 'src="data:image/png;base64,iVBORw=="' in text
