"""Serve a folder of buckets until interrupted: ``python -m benchmarks.s3server --root DIR``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from benchmarks.s3server.faults import Faults
from benchmarks.s3server.server import serve


def main() -> int:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3server", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of buckets; created if missing")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 picks a free one; the address is printed first")
    parser.add_argument(
        "--until-eof", action="store_true", help="exit when standard input closes, as when the parent ends"
    )
    for field in fields(Faults):
        kind = int if isinstance(field.default, int) else float
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="X")
    args = parser.parse_args()
    try:
        faults = Faults(**{field.name: getattr(args, field.name) for field in fields(Faults)})
    except ValueError as error:
        parser.error(str(error))
    args.root.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        serving = asyncio.ensure_future(serve(args.root, args.host, args.port, faults))
        if args.until_eof:
            await asyncio.to_thread(sys.stdin.buffer.read)
            serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    with suppress(KeyboardInterrupt):
        asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
