# SPDX-License-Identifier: Apache-2.0
"""A server's client of a trainer in a process of its own; prints `staged VERSION NUM_BYTES_RECEIVED` for each version.

Run as `python -m tests.run_version_client ADDRESS STAGING DRAFTER`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.trainers import client_of


async def main(address: str, staging: str, drafter: str) -> None:
    """Take versions until killed."""
    num_taken = 0
    async with client_of(address, Path(staging), Path(drafter)) as client:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for version in client.versions[num_taken:]:
                sys.stdout.write(f"staged {version} {client.client.status.num_bytes_received}\n")
                sys.stdout.flush()
            num_taken = len(client.versions)
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
