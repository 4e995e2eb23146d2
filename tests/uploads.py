# SPDX-License-Identifier: Apache-2.0
"""Trajectories to upload, and uploaders that send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adaflash.rpc.trajectory_upload import TrajectoryUploader
from adaflash.rpc.version_client import RetryPolicy, TrainerAddress
from adaflash.training.trajectories import RoundCounts, Trajectory, TrajectoryFeatures, TrajectorySpool
from tests.serving import eventually as _eventually
from tests.versions import TARGET_DIGEST

FAST = RetryPolicy(initial_s=0.02, max_s=0.1)
SEGMENT_BYTES = 4000
# Waits end with what is waited for; the limit is for a machine that has other things to do.
eventually = partial(_eventually, timeout_s=20.0)


def trajectory(index: int, num_features: int = 0, **fields: Any) -> Trajectory:
    """Return a trajectory named by `index`, with `num_features` values captured for each of its tokens but the last."""
    features = None
    if num_features:
        rng = np.random.default_rng(index)
        features = TrajectoryFeatures(rng.standard_normal((4, num_features), np.float32), np.ones((4, 2), np.float32))
    values: dict[str, Any] = {
        "request_id": f"r{index}",
        "sample_index": 0,
        "token_ids": [5, 6, 7, 8, index],
        "num_prompt_tokens": 2,
        "rounds": [RoundCounts(3, 1)],
        "drafter_version": 1,
        "target_digest": TARGET_DIGEST,
        "temperature": 0.0,
        "features": features,
        "record_id": f"record-{index}",
    }
    return Trajectory(**values | fields)


def open_spool(directory: Path, max_bytes: int = 1 << 30) -> TrajectorySpool:
    """Open a spool of many small segments."""
    return TrajectorySpool(directory, max_bytes, 1e9, SEGMENT_BYTES)


@asynccontextmanager
async def uploading(address: str, spool: TrajectorySpool, **settings: Any) -> AsyncIterator[TrajectoryUploader]:
    """Upload a spool in small batches while the block runs."""
    token = settings.pop("token", None)
    settings = {"retry": FAST, "timeout_s": 10.0, "max_batch_bytes": 2000, **settings}
    async with TrajectoryUploader(TrainerAddress(address, token), spool, **settings) as uploader:
        yield uploader
