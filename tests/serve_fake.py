# SPDX-License-Identifier: Apache-2.0
"""Serves the fake engine in a process of its own, exactly as `adaflash serve` serves a real one.

Run as `python -m tests.serve_fake TOKEN_DELAY_S JSON_OF_SERVER_CONFIG`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from adaflash.cli.serve import serve_engine
from adaflash.config import ServerConfig
from tests.fake_engine import FakeEngine


async def main() -> int:
    """Serve until a signal."""
    config = ServerConfig.from_mapping({"grpc_port": 0, **json.loads(sys.argv[2])})
    return await serve_engine(FakeEngine(token_delay_s=float(sys.argv[1])), config)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(asyncio.run(main()))
