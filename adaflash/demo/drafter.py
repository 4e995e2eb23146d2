# SPDX-License-Identifier: Apache-2.0
"""The embedded drafter of the demo model, shipped as package data; see `data/drafter/README.md` for its training."""

from __future__ import annotations

from pathlib import Path

from adaflash.errors import AdaFlashError

_DIRECTORY = Path(__file__).parent / "data" / "drafter"


def demo_drafter_dir() -> Path:
    """Return the directory of the demo drafter in the public DFlash format.

    Raises:
        AdaFlashError: The installation lacks the file, as a source archive without package data would.
    """
    if not (_DIRECTORY / "model.safetensors").is_file():
        raise AdaFlashError(f"the demo drafter is missing from this installation ({_DIRECTORY}): reinstall adaflash")
    return _DIRECTORY
