"""An S3-compatible server that makes trouble on purpose, for tests and benchmarks of what reads object stores.

    python -m benchmarks.s3server --root DIR --latency-ms 130 --latency-sigma 0.4 --p-503 0.01 --p-truncate 0.01

serves the folders in DIR as buckets, to be read, with the standard library alone: GET, HEAD, ranges, conditions,
ListObjectsV2. Its faults (latency, bandwidth, 503, 429, reset, truncation, corruption, stall) are drawn from a seed per
request and attempt, so they do not depend on the order in which requests arrive. In Python:

    with start(folder, latency_ms=130, p_503=0.1, seed=1) as server:
        client(endpoint=server.url)
        server.set(p_503=0)
        server.counts()
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


class Running:
    """A server in a process of its own: its address, the folder of its buckets, the process."""

    def __init__(self, url: str, root: Path, pid: int) -> None:
        self.url, self.root, self.pid = url, root, pid

    def set(self, **knobs: float) -> dict[str, Any]:
        """Change knobs (see `faults.Faults`), forget all attempts, and return all knobs."""
        return self._call("/-/faults", json.dumps(knobs).encode())

    def counts(self) -> dict[str, int]:
        """Return how many requests had which method and status, how many met which fault, and the most at one time."""
        return self._call("/-/counts")

    def n_gets(self) -> int:
        """Return the number of GET requests."""
        return sum(n for kind, n in self.counts().items() if kind.startswith("GET"))

    def _call(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, data=body, method="GET" if body is None else "PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def start(root: str | os.PathLike[str], **knobs: float) -> Iterator[Running]:
    """Run a server for the length of a with-block, in a process that ends with this one, however that ends."""
    command = [sys.executable, "-m", "benchmarks.s3server", "--root", str(root), "--until-eof"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    here = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            yield Running(url, Path(root), process.pid)
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
