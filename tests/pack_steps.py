"""A packing run that is killed at any one step, and resumed; used by `tests.test_pack_faults`.

A step is a call that changes the disk: making, syncing, renaming and removing files and folders; the process ends just
before it, which is also just after the previous step. ``python -m tests.pack_steps FOLDER FIRST STRIDE`` kills a
process at every STRIDE-th step from FIRST on, each twice: a packing run, and the one that resumes it. After each, the
target is the old one or the new one, complete; and at the end it is byte for byte what an undisturbed run makes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpuload
from tests.test_pack import cells, written
from tests.test_pack_faults import contents

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = ("replace", "rename", "remove", "unlink", "rmdir", "mkdir", "fsync")


def pack(source: Path, target: Path) -> None:
    """Pack with the settings of all runs here."""
    gpuload.pack(source, target, obs=["plate"], memory=1 << 20, block_size=16, num_threads=1, overwrite=True)


def run(source: Path, target: Path, step: int) -> bool:
    """Pack in a process that is killed at a step; return whether it finished before that."""
    pid = os.fork()
    if not pid:
        left = [step]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def step_on(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return step_on

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            pack(source, target)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"step {step}: it ended with {status}"
    return status == 0


def check(target: Path, old: dict[str, bytes], new: dict[str, bytes]) -> None:
    """Fail if the target is neither the old nor the new one; between two renames the old one is next to it."""
    place = target if target.exists() else Path(f"{target}.packing", "replaced")
    assert contents(place) in (old, new), f"{place} is neither what was there nor what was to come"


def main() -> None:
    """Kill at every stride-th step, and print how many there are."""
    folder, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(exist_ok=True)
    source, other = written(cells(600, 60), folder / "in.h5ad"), written(cells(50, 60, 1), folder / "other.h5ad")
    pack(source, folder / "whole.zarr")  # everything is compiled before the processes fork
    pack(other, folder / "other.zarr")
    new, old = contents(folder / "whole.zarr"), contents(folder / "other.zarr")
    step, target, is_over = first, folder / "out.zarr", False
    while not is_over:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "other.zarr", target)
        is_over = run(source, target, step)
        check(target, old, new)
        run(source, target, step // 2)
        check(target, old, new)
        assert run(source, target, 1 << 30)
        assert contents(target) == new, f"step {step}: what was gone on with differs"
        assert not Path(f"{target}.packing").exists()
        step += stride
    print(step)


if __name__ == "__main__":
    main()
