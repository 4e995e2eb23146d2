# SPDX-License-Identifier: Apache-2.0
"""Keeps step costs in the cache folder: a later start on the same machine need not measure, or learn, them again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from adaflash import __version__
from adaflash.cache.block_manager import BlockManager
from adaflash.config import cache_dir
from adaflash.durable_files import replace_file
from adaflash.engine.profile_cases import ProfileLimits
from adaflash.engine.profiling import DEFAULT_BUDGET_S, profile
from adaflash.engine.runner import Runner
from adaflash.models.strict_json import parse_json
from adaflash.ops.device_name import device_name
from adaflash.speculative.cost_model import CostModel
from adaflash.speculative.dflash import DFlashDrafter

logger = logging.getLogger(__name__)

# Raise it when measuring changes, so that what was measured before is not used any more.
_FORMAT_VERSION = 3
_FOLDER = "step-costs"


def load_or_profile(
    runner: Runner,
    blocks: BlockManager,
    limits: ProfileLimits,
    budget_s: float = DEFAULT_BUDGET_S,
    folder: Path | None = None,
) -> tuple[CostModel, CostCache]:
    """Return the costs remembered for this machine and these models, or measure and remember them; and their file.

    Args:
        runner: The models and their KV pools.
        blocks: Whose blocks the pools hold.
        limits: What the engine may pack.
        budget_s: See `profile`.
        folder: Where costs are kept; None is `step-costs` in the cache folder.

    Raises:
        CapacityError: They must be measured, and no KV block is free.
    """
    cache = CostCache(cost_identity(runner, blocks.block_size, limits), folder)
    model = cache.load()
    if model is None:
        model = profile(runner, blocks, limits, budget_s)
        cache.save(model)
    return model, cache


def cost_identity(runner: Runner, block_size: int, limits: ProfileLimits) -> dict[str, object]:
    """Return all that measured costs depend on, as plain JSON values; of models their shapes, not their weights."""
    values = {
        "adaflash": __version__,
        "torch": torch.__version__,
        "backend": runner.backend.name,
        "device": device_name(runner.backend.device),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": str(runner.target.dtype),
        "target": asdict(runner.target.config),
        "drafter": _drafter_layout(runner),
        "kv_block_size": block_size,
        "row_multiple": runner.backend.row_multiple,
        "limits": asdict(limits),
    }
    plain: dict[str, object] = json.loads(json.dumps(values, default=str))
    return plain


class CostCache:
    """One file of costs; nothing that is wrong with it stops anybody. Of several engines the last one to save counts.

    Args:
        identity: What the costs depend on.
        folder: Where files are kept; None is `step-costs` in the cache folder.
    """

    def __init__(self, identity: Mapping[str, object], folder: Path | None = None) -> None:
        self._identity = dict(identity)
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        self.path = (cache_dir() / _FOLDER if folder is None else folder) / f"v{_FORMAT_VERSION}-{digest[:16]}.json"
        self._kept: dict[str, object] | None = None

    def load(self) -> CostModel | None:
        """Return the costs on file; None when there are none, or none that can be used, which is logged."""
        try:
            values = parse_json(self.path.read_bytes())
            if not isinstance(values, dict) or values.get("identity") != self._identity:
                raise ValueError("it was measured for something else")
            model = CostModel.from_json(values.get("costs"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("step costs on file cannot be used path=%s reason=%s", self.path, error)
            return None
        self._kept = model.to_json()
        logger.info("step costs loaded path=%s", self.path)
        return model

    def save(self, model: CostModel) -> None:
        """Put costs on file, all of them or nothing, unless they are what this object loaded or saved last.

        A folder that cannot be written, or is full, is logged.
        """
        costs = model.to_json()
        if costs == self._kept:
            return
        values = {"identity": self._identity, "costs": costs}
        data = (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, data)
        except OSError as error:
            logger.warning("step costs cannot be kept for the next start path=%s reason=%s", self.path, error)
        else:
            self._kept = costs
            logger.info("step costs kept path=%s", self.path)


def _drafter_layout(runner: Runner) -> dict[str, object] | None:
    drafter = runner.drafter
    if drafter is None:
        return None
    return {
        "kind": type(drafter).__name__,
        "config": asdict(drafter.config) if isinstance(drafter, DFlashDrafter) else None,
        "draft_block_size": drafter.draft_block_size,
        "num_layers": drafter.num_layers,
        "num_kv_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "tap_layer_ids": drafter.tap_layer_ids,
        "num_columns": None if drafter.column_token_ids is None else len(drafter.column_token_ids),
        "has_length_head": drafter.length_head is not None,
    }
