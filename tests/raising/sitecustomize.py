"""Record at which lines errors of gpuload are made, in the folder that GPULOAD_RAISED names.

Python imports a module of this name on startup, from PYTHONPATH: so `tests.raised` has it in every program that a test
starts. This does not import gpuload; once something does, its errors are watched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class Watch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import ``gpuload.errors`` as usual, and watch its errors."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Take over the one module, once."""
        if name != "gpuload.errors":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leave it to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and watch its errors."""
        assert self._loader is not None
        self._loader.exec_module(module)
        watch(module.GpuloadError)


def watch(kind: Any) -> None:
    """Record from now on where errors of a class, and of its subclasses, are made."""
    seen: set[tuple[str, int]] = set()

    def note(self: Any, *args: Any) -> None:
        frame = sys._getframe(1)
        # Outside the error's own constructors, and no further: other classes make errors in theirs.
        while frame.f_locals.get("self") is self and frame.f_back is not None:
            frame = frame.f_back
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in seen:
            with suppress(OSError), Path(os.environ["GPULOAD_RAISED"], str(os.getpid())).open("a") as file:
                file.write(f"{place[0]}:{place[1]}\n")
                seen.add(place)
        super(kind, self).__init__(*args)

    kind.__init__ = note


if "GPULOAD_RAISED" in os.environ:
    if "gpuload.errors" in sys.modules:
        watch(sys.modules["gpuload.errors"].GpuloadError)
    else:
        sys.meta_path.insert(0, Watch())
