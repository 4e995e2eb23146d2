# SPDX-License-Identifier: Apache-2.0
"""Publishes the weights of an older version again, under a new number."""

from __future__ import annotations

import shutil
from pathlib import Path

from adaflash.training.manifest import CONFIG_FILE, MODEL_FILE
from adaflash.training.version_directory import Publication
from adaflash.training.weight_store import WeightStore


def republish(store: WeightStore, version: int, idempotency_key: str = "") -> int:
    """Return the number of a new version with the weights of a good one, which `base_version` then names.

    Args:
        store: Has the version, and gets the new one.
        version: Whose weights are wanted.
        idempotency_key: A second call with the same key and version answers as the first; empty for none.

    Raises:
        UnknownVersionError: The version is not in the store.
        BadVersionError: It was marked bad.
        DamagedVersionError: Its files are not those that were published; they are hashed before.
        WeightError: The disk is full or failed.
    """
    key = f"republish-{version}-{idempotency_key}" if idempotency_key else ""
    known = store.find(key)
    if known is not None:
        return known  # whatever became of the old version since
    stored = store.get(version)
    store.verify(version)

    def write(directory: Path) -> None:
        for name in (MODEL_FILE, CONFIG_FILE):
            shutil.copyfile(stored.directory / name, directory / name)

    manifest = stored.manifest
    return store.publish(
        write,
        Publication(
            manifest.target_digest,
            manifest.train_step,
            manifest.metrics,
            base_version=version,
            idempotency_key=key,
        ),
    )
