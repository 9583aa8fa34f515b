"""Make the README's figures of a GPU, and the tables behind them, from the results.

``python -m benchmarks.report_gpu benchmarks/results/gpu.jsonl --plot benchmarks/results/gpu.png --readme README.md
--details benchmarks/README.md``

Of each arm, the records of the newest commit that measured it count. Records of another card, file or size of
minibatches have tables of their own; the README and the plot show those with the most arms. Nothing is measured here.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import frame, report
from benchmarks.run_gpu import ARMS, STEP_S
from gpuload.cli.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"

PACK = frame.ROOT / "benchmarks" / "results" / "pack.jsonl"

FILE, CACHED, RIVAL = "gpuload/dense/pinned", "gpuload/dense/cached", "annbatch/dense"
VERIFIED, UNVERIFIED = "gpuload/dense/verified", "gpuload/dense/unverified"
STEP, STEP_CACHED = "gpuload/step/pinned", "gpuload/step/cached"
H2D, FILL, INFLATE = "ceiling/h2d", "ceiling/fill", "ceiling/nvcomp-deflate"

SHOWN = {
    FILE: "from the gzip .h5ad file",
    CACHED: "in later epochs, device_cache=",
    "gpuload/dense/kept": "in later epochs, memory_cache=",
    "gpuload/csr": "from the file, as CSR",
    "gpuload/csr/cached": "in later epochs, as CSR",
    "gpuload/csr/kept": "in later epochs, memory_cache=, as CSR",
    "gpuload-packed/dense": "packed, lz4",
    "gpuload-packed-zstd/dense": "packed, zstd",
    "gpuload-packed-none/dense": "packed, no codec",
    "gpuload-packed/dense/cached": "packed, in later epochs",
    "gpuload/dali/pinned": "from the file, through DALI",
    RIVAL: "annbatch, preload_to_gpu",
    STEP: "from the file, beside a step of 1.3 ms",
    STEP_CACHED: "in later epochs, beside that step",
}
"""The arms in the picture, in order, and what it calls them."""

RATES = ((FILE, 1e6), (CACHED, 2e6))
"""Goals: an arm, and the required cells/s."""

LEAST_SHARE = 0.6
"""Goal: what is read from the file, of the lowest ceiling."""

RATIOS = ((FILE, 5.0), (FILE, 10.0))
"""Goals: an arm, and its required speed as a multiple of annbatch's."""

MOST_WAITING, MOST_CHECKING = 0.05, 0.03
"""Goals: the share of time that a training step may wait, and that checksums may take."""

CODECS = {"gpuload-packed": "lz4", "gpuload-packed-zstd": "zstd-3"}
"""Arms that read a packed store, and the codec that nvCOMP decodes there."""

CELLS_PER_CHUNK = 64
"""Of a packed store."""

COLD = ", cold"
"""What ends the name of an arm that began with the file out of the page cache."""

AS_STORED = 1.05
"""A device cache larger than what is stored, by this factor, holds decoded chunks."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The records of an arm at one commit that measured it last, in order; those that failed are counted only."""

    name: str
    records: tuple[dict[str, Any], ...]
    n_failed: int

    def middle(self, key: str) -> float | None:
        """Return the median of a figure; None where it was not measured."""
        found = [record[key] for record in self.records if record.get(key) is not None]
        return median(found) if found else None

    @property
    def cells_per_s(self) -> float:
        """The median; 0 where there is none."""
        return self.middle("cells_per_s") or 0.0

    @property
    def first_epoch(self) -> float | None:
        """The median over the rounds of the first of the timed epochs, in cells/s; None where it was not recorded."""
        found = [record["epochs_cells_per_s"][0] for record in self.records if "epochs_cells_per_s" in record]
        return median(found) if found else None

    @property
    def extremes(self) -> tuple[float, float]:
        """The lowest and the highest cells/s of all timed epochs."""
        rates = [rate for record in self.records for rate in record.get("epochs_cells_per_s", [record["cells_per_s"]])]
        return min(rates), max(rates)

    @property
    def n_epochs(self) -> int:
        """The timed epochs of all rounds."""
        return sum(len(record.get("epochs_cells_per_s", [0])) for record in self.records)


def runs(records: Iterable[dict[str, Any]]) -> list[dict[str, Arm]]:
    """Return the arms, by name, of each card, file and size of minibatches; the one with the most arms first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        sizes = (record["batch_size"], record["fetch_factor"])
        groups[record["gpu"]["card"], record["file"]["name"], record["file"]["nbytes"], *sizes].append(record)
    newest_first = sorted(groups.values(), key=lambda group: str(group[-1]["time"]), reverse=True)
    found = [arms for arms in map(_arms, newest_first) if any(arm.records for arm in arms.values())]
    return sorted(found, key=len, reverse=True)


def _arms(records: list[dict[str, Any]]) -> dict[str, Arm]:
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_name[record["arm"] + COLD * (record["cache"] == "cold")].append(record)
    order = [*ARMS]
    found = {}
    for name in sorted(by_name, key=lambda name: order.index(name) if name in order else len(order)):
        last = [record for record in by_name[name] if record["commit"] == by_name[name][-1]["commit"]]
        good = tuple(record for record in last if "error" not in record)
        found[name] = Arm(name, good, len(last) - len(good))
    return found


def ceilings(arms: dict[str, Arm], name: str) -> dict[str, float]:
    """Return the ceilings that bind an arm, in cells/s; only those that were measured.

    A device cache spares copies to the device, and decoding if it holds decoded chunks; a cache in host memory, which
    holds the same, only the latter. A minibatch of CSR is a few per cent of the bytes of a dense one, so writing it
    counts as nothing.
    """
    arm, (kind, *words) = arms[name], name.removesuffix(COLD).split("/")
    is_cached, found = "cached" in words, {}
    on_device = arms.get(name.replace("/kept", "/cached")) if "kept" in words else None
    stored = _stored_per_cell(arm) if on_device is None else _cached_per_cell(on_device)
    if not is_cached and stored and (copied := _figure(arms, H2D, "bytes_per_s")):
        found["copies to the device"] = copied / stored
    holder = arm if is_cached else on_device
    if not (holder is not None and _holds_decoded(holder)) and (rate := _decoded(arms, kind)):
        found["nvCOMP alone"] = rate
    if "csr" not in words and (rate := _figure(arms, FILL, "cells_per_s")):
        found["writing dense rows"] = rate
    return found


def _decoded(arms: dict[str, Arm], kind: str) -> float | None:
    """Return at how many cells/s nvCOMP decodes what arms of a kind read."""
    if kind == "gpuload":
        return _figure(arms, INFLATE, "cells_per_s")
    found = {(row["codec"], row["cells_per_chunk"]): row["cells_per_s"] for row in codec_rows(arms)}
    return found.get((CODECS.get(kind, ""), CELLS_PER_CHUNK))


def _holds_decoded(arm: Arm) -> bool:
    last = arm.records[-1]
    return bool(last["memory_nbytes"]["cache"] > AS_STORED * last.get("store_nbytes", last["file"]["nbytes"]))


def _cached_per_cell(arm: Arm) -> float | None:
    """Return how many bytes of a device cache a cell takes; None if the number of cells is unknown."""
    last = arm.records[-1]
    return last["memory_nbytes"]["cache"] / last["file"]["n_obs"] if "n_obs" in last["file"] else None


def _stored_per_cell(arm: Arm) -> float | None:
    """Return how many bytes a cell takes on disk; where the number of cells is unknown, how many were read for it."""
    last = arm.records[-1]
    if "n_obs" in last["file"]:
        return float(last.get("store_nbytes", last["file"]["nbytes"]) / last["file"]["n_obs"])
    return last["read_bytes_per_s"] / last["cells_per_s"] if "read_bytes_per_s" in last else None


def _figure(arms: dict[str, Arm], name: str, key: str) -> float | None:
    return arms[name].middle(key) if name in arms else None


def codec_rows(arms: dict[str, Arm]) -> list[dict[str, Any]]:
    """Return the rates of codecs, medians over the rounds."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in arms["codecs"].records if "codecs" in arms else ():
        for row in record["codecs"]:
            rows[row["codec"], row["cells_per_chunk"]].append(row)
    return [
        {**found[0], **{key: median(row[key] for row in found) for key in ("bytes_per_s", "cells_per_s")}}
        for found in rows.values()
    ]


def _lowest(arms: dict[str, Arm], name: str) -> tuple[str, float] | None:
    return min(ceilings(arms, name).items(), key=lambda item: item[1], default=None)


def _share(arms: dict[str, Arm], name: str) -> float | None:
    """Return what an arm reaches of its lowest ceiling; None where that may be another: a training step, the disk."""
    if name not in arms or not arms[name].records or "step" in name.split("/") or name.endswith(COLD):
        return None
    lowest = _lowest(arms, name)
    return arms[name].cells_per_s / lowest[1] if lowest else None


def _checking(arms: dict[str, Arm]) -> float | None:
    """Return the share of time that checksums take where all are verified; None if another commit measured without."""
    found = [arms[name] for name in (VERIFIED, UNVERIFIED) if name in arms and arms[name].records]
    if len(found) < 2 or found[0].records[-1]["commit"] != found[1].records[-1]["commit"]:
        return None
    return 1 - found[0].cells_per_s / found[1].cells_per_s


def table(arms: dict[str, Arm]) -> str:
    """Return a Markdown table of the arms beside their lowest ceiling and annbatch."""
    columns = ("arm", "cells/s (median)", "range", "epochs", "first epoch", "lowest ceiling, cells/s", "share")
    lines = _head((*columns, "over annbatch", "waited", "trained", "I/O path", "commit"))
    rival = _figure(arms, RIVAL, "cells_per_s")
    for name, arm in arms.items():
        if name.startswith("ceiling/") or name == "codecs":
            continue
        if not arm.records:
            lines.append(f"| {name} | failed |" + " |" * (len(columns) + 3))
            continue
        lowest = _lowest(arms, name) if _share(arms, name) and name.startswith("gpuload") else None
        is_beside = rival and "dense" in name and name.startswith("gpuload")
        cells = [
            name + (f" ({arm.n_failed} failed)" if arm.n_failed else ""),
            f"{arm.cells_per_s:,.0f}",
            "{:,.0f}-{:,.0f}".format(*arm.extremes),
            str(arm.n_epochs),
            f"{arm.first_epoch:,.0f}" if arm.first_epoch and not {"cached", "kept"} & set(name.split("/")) else "",
            f"{lowest[0]} {lowest[1]:,.0f}" if lowest else "",
            _percent(_share(arms, name) if lowest else None),
            f"{arm.cells_per_s / rival:.1f}x" if is_beside and rival else "",
            _percent(arm.middle("waited_share")),
            _percent(arm.middle("step_share") or None),
            ", ".join(dict.fromkeys(record["io_mode"] for record in arm.records)),
            arm.records[-1]["commit"].removesuffix("+changes")[:7],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def limits(arms: dict[str, Arm]) -> str:
    """Return a Markdown table of the ceilings; "" where none was measured."""
    lines = _head(("ceiling", "GB/s (median)", "range", "rounds", "cells/s"))
    for name, what in {
        H2D: "copies of page-locked memory to the device",
        INFLATE: "nvCOMP alone, deflate, chunks of the file",
        FILL: "writing device memory, as dense rows",
    }.items():
        if name in arms and arms[name].records:
            rates = [record["bytes_per_s"] / 1e9 for record in arms[name].records]
            cells = arms[name].cells_per_s
            if name == H2D and FILE in arms and arms[FILE].records:
                cells = ceilings(arms, FILE).get("copies to the device", 0.0)
            figures = f"{median(rates):,.1f} | {min(rates):,.1f}-{max(rates):,.1f} | {len(rates)}"
            lines.append(f"| {what} | {figures} | {f'{cells:,.0f}' if cells else ''} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def stages(arms: dict[str, Arm]) -> str:
    """Return a Markdown table of what the host's threads did meanwhile, and of device memory; "" without any."""
    names = ("plan_s", "read_s", "decode_s", "take_s", "wait_s")
    columns = ("arm", "planning", "reading", "decoding", "gathering", "waiting", "read, GB/s")
    lines = _head((*columns, "device memory, GB", "of this the cache"))
    for name, arm in arms.items():
        if found := [record for record in arm.records if "stage_s" in record]:
            shares = [median(record["stage_s"][stage] / record["seconds"] for record in found) for stage in names]
            memory = [{k: v for k, v in r["memory_nbytes"].items() if k not in ("host", "metadata")} for r in found]
            sizes = [arm.middle("read_bytes_per_s") or 0.0, median(sum(each.values()) for each in memory)]
            sizes.append(median(each["cache"] for each in memory))
            cells = [name, *map(_percent, shares), *(f"{size / 1e9:.1f}" for size in sizes)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def codecs(arms: dict[str, Arm], pack: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of codecs on the GPU, and on one core of the CPU by the last record of `run_pack`."""
    rows = codec_rows(arms)
    if not rows:
        return ""
    on_cpu = {(row["codec"], row["cells_per_chunk"]): row for row in (pack[-1]["codecs"] if pack else ())}
    columns = ("codec", "cells a chunk", "bytes a cell", "GPU, GB/s", "GPU, cells/s", "one core of a CPU, cells/s")
    lines = _head(columns)
    for row in rows:
        cpu = on_cpu.get((row["codec"], row["cells_per_chunk"]))
        nbytes = row["data_bytes_per_cell"] + row["indices_bytes_per_cell"]
        rates = f"{row['bytes_per_s'] / 1e9:,.1f} | {row['cells_per_s']:,.0f}"
        said = f"{cpu['decode_cells_per_s']:,.0f}" if cpu else ""
        lines.append(f"| {row['codec']} | {row['cells_per_chunk']} | {nbytes:,.0f} | {rates} | {said} |")
    lines += ["", "With no codec, chunks are copied on the device."]
    if on_cpu:
        lines[-1] += f" The CPU is {pack[-1]['machine']['cpu']}, and its cells are of {pack[-1]['file']['name']}."
    return "\n".join(lines)


def goals(arms: dict[str, Arm]) -> list[tuple[str, str, str, bool]]:
    """Return the goals that were measured: what, wanted, reached, and whether that is met."""
    found: list[tuple[str, str, str, bool]] = []
    for name, least in RATES:
        if rate := _figure(arms, name, "cells_per_s"):
            found.append((f"{name}: cells/s", f"at least {least:,.0f}", f"{rate:,.0f}", rate >= least))
    if (share := _share(arms, FILE)) is not None:
        wanted = f"at least {LEAST_SHARE:.0%}"
        found.append((f"{FILE}: share of its lowest ceiling", wanted, f"{share:.0%}", share >= LEAST_SHARE))
    rival = _figure(arms, RIVAL, "cells_per_s")
    for name, times in RATIOS:
        if rival and (rate := _figure(arms, name, "cells_per_s")):
            ratio = rate / rival
            found.append((f"{name}: speed over {RIVAL}", f"at least {times:g}x", f"{ratio:.1f}x", ratio >= times))
    for name in (STEP, STEP_CACHED):
        if (waited := _figure(arms, name, "waited_share")) is not None:
            wanted = f"less than {MOST_WAITING:.0%}"
            found.append((f"{name}: time that the step waits", wanted, f"{waited:.1%}", waited < MOST_WAITING))
    if (checking := _checking(arms)) is not None:
        spread = max(high / low - 1 for low, high in (arms[name].extremes for name in (VERIFIED, UNVERIFIED)))
        reached = f"{checking:.1%} (rates spread by {spread:.1%})"
        wanted = f"less than {MOST_CHECKING:.0%}"
        found.append((f"{VERIFIED}: time that checksums take", wanted, reached, checking < MOST_CHECKING))
    return found


def remarks(arms: dict[str, Arm]) -> list[str]:
    """Return what the figures do not say by themselves."""
    said, is_slowed = [], False
    for name, how in ((STEP, "from the file"), (STEP_CACHED, "from the device cache")):
        waited, trained = _figure(arms, name, "waited_share"), _figure(arms, name, "step_share")
        if waited is not None and trained:
            said.append(f"{how}, it waited for {waited:.1%} of the time and trained for {trained:.0%}")
            is_slowed = is_slowed or waited + trained < 1 - MOST_WAITING
    found = []
    if said:
        why = (
            " The rest is no waiting: gathering is on the step's own stream, and other work on the GPU slows the step."
        )
        if any("step_s" not in record for name in (STEP, STEP_CACHED) if name in arms for record in arms[name].records):
            why += " The step alone was timed for 30 ms only, in which a GPU may clock higher than it can for long."
        found.append(f"Beside a training step of {1000 * STEP_S:g} ms a minibatch: {'; '.join(said)}.{why * is_slowed}")
    missed = [f"{text}: {reached} (wanted: {wanted})" for text, wanted, reached, is_met in goals(arms) if not is_met]
    return found + ([f"Not met: {'; '.join(missed)}."] if missed else [])


def conditions(arms: dict[str, Arm]) -> str:
    """Return one line on the machine, the file and the settings."""
    records = [record for arm in arms.values() for record in arm.records]
    last, file = records[-1], {k: v for record in records for k, v in record["file"].items()}
    cells = f", {file['n_obs']:,} cells x {file['n_vars']:,} genes, {file['compression']}" if "n_obs" in file else ""
    found = dict.fromkeys(record["commit"].removesuffix("+changes")[:7] for record in records)
    commits = f"commit{'s' * (len(found) > 1)} {', '.join(found)}"
    caches = " and ".join(dict.fromkeys(record["cache"] for record in records))
    n_rounds = sorted({len(arm.records) for arm in arms.values() if arm.records})
    rounds = " to ".join(dict.fromkeys([*map(str, n_rounds[:-1][:1]), count(n_rounds[-1], "round")]))
    n_epochs = max(arm.n_epochs for arm in arms.values() if arm.records)
    vary = "so how much the figures vary is not known" if n_epochs == 1 else f"medians of up to {n_epochs} epochs"
    return (
        f"{last['gpu']['card']}; {last['machine']['cores']} cores of {last['machine']['cpu']}; {file['name']}{cells}, "
        f"{file['nbytes'] / 1e6:,.0f} MB; minibatches of {last['batch_size']:,} cells, {last['fetch_factor']} a fetch; "
        f"page cache {caches}; {commits}; {rounds} an arm, {vary}."
    )


def details(records: Iterable[dict[str, Any]], pack: Sequence[dict[str, Any]] = ()) -> str:
    """Return all tables of all cards."""
    parts = []
    for arms in runs(records):
        lines = ["| goal | wanted | reached | met |", "| --- | ---: | ---: | :---: |"]
        for text, wanted, reached, is_met in goals(arms):
            lines.append(f"| {text} | {wanted} | {reached} | {'yes' if is_met else 'no'} |")
        said = "\n".join(f"- {remark}" for remark in remarks(arms))
        parts += [conditions(arms), limits(arms), table(arms), "\n".join(lines) if len(lines) > 2 else "", said]
        parts += [stages(arms), codecs(arms, pack)]
    return "\n\n".join(filter(None, parts))


def short(arms: dict[str, Arm]) -> str:
    """Return the README's lines."""
    rival = _figure(arms, RIVAL, "cells_per_s")
    lines = []
    for name, how in ((FILE, "From the `.h5ad` file"), (CACHED, "In later epochs with `device_cache=`")):
        if rate := _figure(arms, name, "cells_per_s"):
            lowest, share = _lowest(arms, name), _share(arms, name)
            of = f", {_percent(share)} of its lowest ceiling ({lowest[0]}, {lowest[1]:,.0f})" if lowest else ""
            beside = f", {rate / rival:.1f} times annbatch with `preload_to_gpu` ({rival:,.0f})" if rival else ""
            lines.append(f"- {how}: **{rate:,.0f} cells/s**, dense float32{of}{beside}.")
    lines += [f"- {remark}" for remark in remarks(arms)]
    return "\n".join([conditions(arms), "", *lines])


def plot(arms: dict[str, Arm], path: Path) -> None:
    """Draw cells/s of the arms of loaders as bars, the range as a line; across each bar the ceilings that bind it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = [arms[name] for name in SHOWN if name in arms and arms[name].records]
    most = 1.5 * max((arm.cells_per_s for arm in shown), default=0.0)
    colours = {"copies to the device": "#3b6ea5", "nvCOMP alone": "#b3541e", "writing dense rows": "#7a4b94"}
    with mpl.rc_context({"svg.hashsalt": "gpuload", "font.size": 9}):
        figure = Figure(figsize=(9, 1.2 + 0.3 * len(shown)), layout="constrained")
        axes = figure.subplots()
        beyond, drawn = [], {}
        for place, arm in enumerate(shown):
            is_ours = arm.name.startswith("gpuload")
            low, high = arm.extremes
            spread = [[arm.cells_per_s - low], [high - arm.cells_per_s]]
            colour = "#2a7f62" if is_ours else "#9aa5b1"
            axes.barh(place, arm.cells_per_s, height=0.7, color=colour, xerr=spread, ecolor="#333333")
            beside = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.annotate(
                f"{arm.cells_per_s:,.0f}",
                (high, place),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox=beside,
                zorder=5,
            )
            for label, rate in ceilings(arms, arm.name).items() if is_ours else ():
                if rate > most:
                    beyond.append(label)
                else:
                    line = axes.vlines(rate, place - 0.5, place + 0.5, colours[label], "dashed", label=label)
                    drawn.setdefault(label, line)
        axes.set_yticks(range(len(shown)), [SHOWN[arm.name] for arm in shown])
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        higher = ", ".join(label for label in dict.fromkeys(beyond) if label not in drawn)
        outside = f"; not in the picture, as higher: {higher}" if higher else ""
        axes.set_xlabel(f"cells/s (median; line: range over the epochs)\ndashed: ceilings{outside}")
        card = next(record["gpu"]["card"] for arm in arms.values() for record in arm.records)
        axes.set_title(f"gpuload (green) on one {card}", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if drawn:
            figure.legend(handles=list(drawn.values()), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
        figure.savefig(path, dpi=150)


def _head(columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; write the figure and the files if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON lines from run_gpu")
    parser.add_argument("--plot", type=Path, help="write the plot to this file (PNG, SVG or PDF)")
    parser.add_argument("--readme", type=Path, help=f"write the short text between {BEGIN} and {END} in this file")
    parser.add_argument("--details", type=Path, help="write all printed output between the same lines in this file")
    options = parser.parse_args(arguments)
    records = report.read_records(options.results)
    if not (found := runs(records)):
        parser.exit(1, f"report_gpu: {options.results} has no figures; run benchmarks.run_gpu first.\n")
    content = details(records, report.read_records(PACK))
    print(content)
    if options.plot:
        plot(found[0], options.plot)
    for path, text in ((options.readme, short(found[0])), (options.details, content)):
        if path:
            path.write_text(report.replace_between_markers(path.read_text(), text, BEGIN, END))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
