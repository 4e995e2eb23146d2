# SPDX-License-Identifier: Apache-2.0
"""A server's uploader in a process of its own, which is killed; writes trajectories and uploads them meanwhile.

Run as `python -m tests.run_uploader ADDRESS SPOOL FIRST LAST`; prints `ready`, then `done` when all are delivered.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.uploads import open_spool, trajectory, uploading


async def main(address: str, folder: str, first: str, last: str) -> None:
    """Put one trajectory after the other into the spool, then wait until the trainer has them."""
    spool = open_spool(Path(folder))
    async with uploading(address, spool) as uploader:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for index in range(int(first), int(last)):
            await asyncio.to_thread(spool.take, trajectory(index, num_features=20))
            await asyncio.sleep(0.002)
        while uploader.status.position != spool.end:
            await asyncio.sleep(0.01)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    spool.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
