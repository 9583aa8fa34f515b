"""GPU utilisation while something runs, from the driver's own counters. The only user of pynvml."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

PERIOD_S = 0.1
"""The driver averages over 1/6 s or more (nvmlUtilization_t), so sampling more often would add nothing."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The utilisation of one GPU.

    Attributes
    ----------
    percent
        Percentage of the preceding period in which a kernel ran, 0 to 100, at each of these times.
    """

    name: str
    at_s: list[float]
    percent: list[float]

    def since(self, start_s: float) -> Busy:
        """Return what is not before a time."""
        kept = [k for k, at in enumerate(self.at_s) if at >= start_s]
        return Busy(self.name, [self.at_s[k] for k in kept], [self.percent[k] for k in kept])

    def as_dict(self) -> dict[str, Any]:
        """Return the mean, and the share of the samples at which it did nothing."""
        n = max(1, len(self.percent))
        return {
            "name": self.name,
            "mean_percent": sum(self.percent) / n,
            "idle_share": sum(percent == 0 for percent in self.percent) / n,
            "n_samples": len(self.percent),
        }


class Utilisation:
    """Asks the driver in a thread of its own during a with-block; of a machine without one, `gpus` is empty.

    Attributes
    ----------
    gpus
        Of those that CUDA_VISIBLE_DEVICES lets this process see.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self.gpus: list[Busy] = []

    def __enter__(self) -> Self:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no package, no driver, no GPU: each has errors of its own, all mean the same
            return self
        self._nvml = pynvml
        handles = _visible(pynvml)
        self.gpus = [Busy(f"GPU {name}", [], []) for name in handles]
        self._thread = threading.Thread(
            target=self._ask, args=(list(handles.values()),), name="gpuload-utilisation", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _ask(self, handles: list[Any]) -> None:
        while not self._stop.wait(PERIOD_S):
            for handle, gpu in zip(handles, self.gpus, strict=True):
                try:
                    percent = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                except self._nvml.NVMLError:  # a part of a GPU (MIG) has no such counter
                    continue
                gpu.at_s.append(time.perf_counter())
                gpu.percent.append(percent)


def _visible(pynvml: Any) -> dict[str, Any]:
    """Return the handles of the GPUs that this process may use, by the names that the driver numbers them by."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(pynvml.nvmlDeviceGetCount())] if wanted is None else wanted.split(",")
    found: dict[str, Any] = {}
    for name in (name.strip() for name in names):
        try:
            if name.isdigit():
                found[name] = pynvml.nvmlDeviceGetHandleByIndex(int(name))
            elif name.startswith(("GPU-", "MIG-")):
                found[name] = pynvml.nvmlDeviceGetHandleByUUID(name)
            else:
                break  # as CUDA has it: the list ends at the first that is none
        except pynvml.NVMLError:
            break
    return found
