"""One self-contained HTML page of the results of `gpuload bench`. Text and SVG; no package, no network, no script."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.cli import text
from gpuload.cli.stages import HEADER, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STAGES = ("read", "decode", "take_rows")
"""Stages whose rate is compared with a ceiling."""

MOST_EPOCHS = 12
"""Epochs whose cache hits are listed."""

_NOTE = (
    '<p class="note">A bar is the rate of one thread while the others work, as part of what one thread can do with '
    "nothing else running, measured on the spot (the mark). That of <em>decode</em> is a library's, and that of "
    "<em>take_rows</em> writes every value; gpuload's own decoders may be faster, and a reused minibatch is cleared "
    "only where values were written, so both may be above 100 %. <em>plan</em> and <em>wait</em> are seconds of the "
    "training thread; the others are work of native threads.</p>"
)

_NOTE_OF_A_GPU = (
    '<p class="note">These are seconds of the host\'s threads, which launch the work of the GPU or wait for it.</p>'
)

_COLORS = ("#4c72b0", "#55a868", "#c9a227", "#c44e52", "#8172b3", "#8c8c8c")

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --faint: #d9d9d9; --paper: #fff; --soft: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #444; --paper: #16181c; --soft: #20242a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
       margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.what { margin-top: 0; opacity: .75; overflow-wrap: anywhere; }
.verdict { background: var(--soft); border-left: 4px solid #4c72b0; padding: .7rem 1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; padding: 0; }
.figures li { list-style: none; background: var(--soft); padding: .8rem 1rem; border-radius: 6px; }
.figures b { display: block; font-size: 1.35rem; } .figures span { opacity: .75; font-size: .85rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .25rem .6rem; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 1px solid var(--faint); font-weight: 600; }
td { border-bottom: 1px solid var(--faint); } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
img, svg { max-width: 100%; height: auto; } .note { opacity: .75; font-size: .88rem; }
"""


def page(result: Mapping[str, Any], versions: Mapping[str, str], timeline: bytes | None = None) -> str:
    """Return the page of what `gpuload.cli.bench.bench` returned, with the versions of packages and a timeline, PNG."""
    title, picture = "gpuload bench", base64.b64encode(timeline or b"").decode()
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="what">{_escaped(", ".join(map(str, result["paths"])))}</p>',
        *([f'<p class="verdict">{_escaped(result["verdict"])}</p>'] if result.get("verdict") else []),
        _figures(result),
        *(
            ["<h2>Stages against their ceilings</h2>", _stages(result["stages"]), _NOTE]
            if result["device"] == "cpu"
            else ["<h2>Stages</h2>", _NOTE_OF_A_GPU]
        ),
        _table(HEADER, rows(result["stages"])),
        "<h2>Rounds</h2>",
        _bars([(f"round {k + 1}", rate) for k, rate in enumerate(result["cells_per_s"]["repeats"])], "cells/s"),
        *_cache(result.get("cache")),
        "<h2>Memory</h2>",
        _memory(result["peak_memory_nbytes"], result["memory_parts_nbytes"], result["device"]),
        *(["<h2>Timeline</h2>", f'<img alt="timeline" src="data:image/png;base64,{picture}">'] if picture else []),
        "<h2>Settings and versions</h2>",
        _table(("", ""), {**_settings(result), **versions}.items()),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _figures(result: Mapping[str, Any]) -> str:
    rates, stages, entropy = result["cells_per_s"], result["stages"], result["entropy_bits"]
    low, high = (text.number(round(rates[key])) for key in ("min", "max"))
    found = [(text.number(round(rates["median"])), f"cells/s, median of {len(rates['repeats'])} ({low} to {high})")]
    if np.isfinite(stages["fraction_of_ceilings"]):
        bound = text.number(round(stages["at_ceilings_cells_per_s"]))
        found.append((text.share(stages["fraction_of_ceilings"]), f"of {bound} cells/s, all stages at their ceilings"))
    if stages["chunks_kept"]:
        found.append((text.share(stages["chunks_kept"]), "of chunks were kept by an earlier epoch"))
    if entropy is not None:
        random = text.bits(entropy["true_random"])
        found.append((f"{text.bits(entropy['mean'])} bits", f"{result['label']} in a minibatch; true random {random}"))
    waits = ", ".join(f"{name[:-2]} {1e3 * seconds:.2f}" for name, seconds in result["waits_s"].items())
    found += [
        (f"{1e3 * result['waits_s']['p50_s']:.2f} ms", f"wait for a minibatch; {waits} ms"),
        (f"{result['first_batch_s']:.2f} s", "from opening to the first minibatch"),
        *((f"{gpu['mean_percent']:.0f} %", f"{gpu['name']} busy, mean") for gpu in result.get("gpus", ())),
        (text.size(result["peak_memory_nbytes"]), "peak memory of the process, on the host"),
        (f"{result['device']}, {result['io_mode']}", "device, and path that the bytes took"),
    ]
    items = "".join(f"<li><b>{_escaped(value)}</b><span>{_escaped(words)}</span></li>" for value, words in found)
    return f'<ul class="figures">{items}</ul>'


def _cache(cache: Mapping[str, Any] | None) -> list[str]:
    """Return the section on cache hits, one line for each of the first epochs; later ones are alike."""
    if cache is None:
        return []
    rows = [
        (
            f"{e['epoch']}{'' if e['is_whole'] else ' (part)'}",
            text.share(e["hit_ratio"]),
            text.size(e["nbytes"]),
        )
        for e in cache["epochs"][:MOST_EPOCHS]
    ]
    said = f"{text.share(cache['hit_ratio'])} of the bytes came from {cache['folder']}"
    left = len(cache["epochs"]) - len(rows)
    more = f"; {left} more epochs are not shown" if left > 0 else ""
    return [
        "<h2>Cache</h2>",
        f"<p>{_escaped(said)}{more}.</p>",
        _table(("epoch", "from the cache", "bytes asked for"), rows),
    ]


def _stages(stages: Mapping[str, Any]) -> str:
    """Draw each stage's rate beside its ceiling, which is at the same position for all."""
    drawn = []
    for k, name in enumerate(STAGES):
        top, stage = 34 * k + 6, stages[name]
        fraction, words = stage["fraction"], "no rate here"
        if np.isfinite(stage["bytes_per_s"]):
            words = f"{text.size(stage['bytes_per_s'])}/s"
        if np.isfinite(fraction):
            drawn += [
                _bar(top, 400 * min(fraction, 1.15), _COLORS[k]),
                f'<line x1="510" x2="510" y1="{top - 3}" y2="{top + 23}" stroke="currentColor" stroke-width="2"/>',
            ]
            words += f", {text.share(fraction)} of {text.size(stage['ceiling_bytes_per_s'])}/s"
        drawn += [_label(top, 0, name), _label(top, 580, words)]
    return _svg(34 * len(STAGES) + 8, drawn)


def _bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    longest = max((value for _, value in rows), default=1.0) or 1.0
    drawn = []
    for k, (name, value) in enumerate(rows):
        top = 34 * k + 6
        words = f"{text.number(round(value))} {unit}"
        drawn += [_label(top, 0, name), _bar(top, 460 * value / longest, _COLORS[0]), _label(top, 580, words)]
    return _svg(34 * len(rows) + 8, drawn)


def _memory(peak: float, parts: Mapping[str, int], device: str) -> str:
    """Draw the peak as one bar of its parts, the rest being Python and its packages; for a GPU, its memory."""
    rest = max(0.0, peak - sum(parts.values()))
    named = {**parts, "Python and its packages": rest} if device == "cpu" else dict(parts)
    total, at, drawn = max(1.0, sum(named.values())), 0.0, []
    for k, (name, nbytes) in enumerate(named.items()):
        width = 780 * nbytes / total
        color, top = _COLORS[k % len(_COLORS)], 40 + 22 * k
        drawn.append(
            f'<rect x="{at:.1f}" y="6" width="{width:.1f}" height="22" fill="{color}"/>'
            f'<rect x="0" y="{top}" width="12" height="12" fill="{color}"/>'
            f'<text x="20" y="{top + 11}">{_escaped(name)}: {text.size(nbytes)}</text>'
        )
        at += width
    return _svg(44 + 22 * len(named), drawn)


def _settings(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what was measured: everything that is neither a result nor a path."""
    return {
        name: str(value)
        for name, value in result.items()
        if value is not None and not isinstance(value, (dict, list)) and not isinstance(value, float)
        if name not in ("verdict", "peak_memory_nbytes")
    }


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escaped(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _svg(height: int, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 800 {height}" width="800" height="{height}" role="img">{"".join(drawn)}</svg>'


def _label(top: float, at: float, words: str) -> str:
    return f'<text x="{at}" y="{top + 15}">{_escaped(words)}</text>'


def _bar(top: float, width: float, color: str) -> str:
    return f'<rect x="110" y="{top}" width="{width:.1f}" height="20" rx="2" fill="{color}"/>'


def _escaped(words: Any) -> str:
    return html.escape(str(words))
