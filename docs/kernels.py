"""Starts the kernels of the notebooks as copies of one process, which has imported what most of them import.

So the build does not import it once for each. Only where a kernel comes from is changed; Jupyter talks to it, and ends
it, as to any other.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib.metadata import EntryPoint
from multiprocessing import forkserver
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

IMPORTED = [
    *("anndata", "ipykernel.kernelapp", "torch", "torch._dynamo"),  # the last is imported by the first optimizer
    *("gpuload.synthetic", "gpuload.opening", "gpuload.torch", "gpuload.backends.cpu"),
]
FORK = multiprocessing.get_context("forkserver")


class Kernel(FORK.Process):
    """A kernel with the part of the interface of `subprocess.Popen` that Jupyter uses."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        """Return the exit status, None while the kernel runs."""
        return self.exitcode

    def wait(self) -> int | None:
        """Wait for the end, and return the exit status."""
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


class Copied(LocalProvisioner):
    """Starts kernels as copies."""

    async def launch_kernel(self, cmd: list[str], **options: Any) -> Any:
        """Start one with the arguments, environment and folder that Jupyter would start a new process with."""
        arguments = cmd[cmd.index("-f") :]
        self.process = Kernel(target=run, args=(arguments, options["cwd"], options["env"]), daemon=True)
        self.process.start()
        self.pid, self.cwd = self.process.pid, options["cwd"]
        return self.connection_info


def run(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Be a kernel until Jupyter ends it."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv[1:] = arguments
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(arguments)


def start() -> None:
    """Begin to import, and let Jupyter start its kernels here."""
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # without, a kernel says on the terminal how to connect to it
    FORK.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    factory = KernelProvisionerFactory.instance()
    name = factory.default_provisioner_name
    factory.provisioners[name] = EntryPoint(name, f"{__name__}:{Copied.__name__}", factory.GROUP_NAME)
