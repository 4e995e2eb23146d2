# SPDX-License-Identifier: Apache-2.0
"""What a trainer continues from after a restart: saved whole or not at all, with the one before as a spare."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from adaflash.durable_files import hash_file, replace_file, sync, sync_tree
from adaflash.errors import AdaFlashError, ConfigError, DamagedVersionError
from adaflash.models.safetensors_file import read_header
from adaflash.models.strict_json import parse_json
from adaflash.training.replay_window import WindowBudget

logger = logging.getLogger(__name__)

FORMAT = 1
_KEPT = 2
_PREFIX, _STAGING, _LOCK_FILE = "state-", ".staging-", "lock"
_TENSORS, _FIGURES = "tensors.safetensors", "state.json"
_RNG = "rng"


@dataclass
class TrainerState:
    """Everything but the tensors.

    Attributes:
        target_digest: Of the target trained for.
        layout_signature: Of the drafter trained.
        lineage: Marks the versions this training published; another one begins when other weights are taken over.
        num_steps: Optimizer steps so far.
        base_version: The version published or taken over last; 0 for the start.
        published_step: `num_steps` then.
        spool_position: Segment and offset behind the last trajectory that was counted in the budget.
        budget: What may still be trained.
        skipped_batches: Batches that were not finite.
    """

    target_digest: str
    layout_signature: str
    lineage: str
    num_steps: int = 0
    base_version: int = 0
    published_step: int = 0
    spool_position: tuple[int, int] = (0, 0)
    budget: WindowBudget = field(default_factory=WindowBudget)
    skipped_batches: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, object]) -> TrainerState:
        """Return the state `to_json` wrote.

        Raises:
            TypeError: A field is missing, unknown, or of another type.
        """
        fields = dict(values)
        budget, position = fields.pop("budget", None), fields.pop("spool_position", None)
        if not (isinstance(budget, dict) and isinstance(position, list) and len(position) == 2):
            raise TypeError("budget or spool_position is missing")
        state = TrainerState(**fields)  # type: ignore[arg-type]  # checked by its sha256
        state.budget, state.spool_position = WindowBudget(**budget), (int(position[0]), int(position[1]))
        return state


@dataclass(frozen=True)
class SavedState:
    """A state read back, with the generator's state [N] uint8 and the learner's tensors by name."""

    state: TrainerState
    rng: Tensor
    tensors: dict[str, Tensor]


class StateDirectory:
    """The states of one trainer on disk. Nothing in it is ever unpickled.

    Args:
        root: Created when missing; one trainer at a time may use it.

    Attributes:
        num_damaged: States that could not be read since the start.

    Raises:
        ConfigError: Another process uses the directory, or it cannot be used.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_damaged = 0
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(root / _LOCK_FILE, thread_local=False)
            self._lock.acquire(timeout=0)
            for path in root.glob(f"{_STAGING}*"):
                shutil.rmtree(path)
        except Timeout as error:
            raise ConfigError(f"trainer state {root} is in use by another process") from error
        except OSError as error:
            raise ConfigError(f"trainer state {root} cannot be used: {error}") from error

    def close(self) -> None:
        """Let another process use the directory."""
        self._lock.release()

    def save(self, state: TrainerState, generator: torch.Generator, tensors: dict[str, Tensor]) -> None:
        """Save a state durably; the one before stays as a spare, older ones are removed.

        Raises:
            OSError: The disk is full or failed; what was saved before is whole.
        """
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 1
        staging = self.root / f"{_STAGING}{number}"
        try:
            staging.mkdir()
            on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(on_host | {_RNG: generator.get_state()}, staging / _TENSORS)
            figures = {"format": FORMAT, "tensors_sha256": hash_file(staging / _TENSORS), **state.to_json()}
            replace_file(staging / _FIGURES, _sealed(figures))
            sync_tree(staging)
            staging.rename(self.root / f"{_PREFIX}{number:012d}")
            sync(self.root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for old in self._numbers()[:-_KEPT]:
            shutil.rmtree(self.root / f"{_PREFIX}{old:012d}", ignore_errors=True)

    def load(self) -> SavedState | None:
        """Return the newest state that is whole, None without one; a damaged one is counted, logged and set aside."""
        for number in reversed(self._numbers()):
            directory = self.root / f"{_PREFIX}{number:012d}"
            try:
                return _read(directory)
            except (AdaFlashError, OSError, ValueError, KeyError, TypeError) as error:
                self.num_damaged += 1
                logger.error(
                    "a trainer's state is damaged, the one before is taken path=%s reason=%s", directory, error
                )
                directory.rename(self.root / f"damaged-{number:012d}")
        return None

    def _numbers(self) -> list[int]:
        names = (path.name.removeprefix(_PREFIX) for path in self.root.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())


def _sealed(values: dict[str, object]) -> bytes:
    body = json.dumps(values)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "state": body}).encode()


def _read(directory: Path) -> SavedState:
    values = _unsealed((directory / _FIGURES).read_bytes())
    found = values.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"format={found!r} is not known: must be {FORMAT}")
    sha256 = hash_file(directory / _TENSORS)
    if sha256 != values.pop("tensors_sha256"):
        raise DamagedVersionError(f"{_TENSORS} has sha256 {sha256}, another than when it was saved")
    tensors = {name: entry.read() for name, entry in read_header(directory / _TENSORS).items()}
    return SavedState(TrainerState.from_json(values), tensors.pop(_RNG), tensors)


def _unsealed(data: bytes) -> dict[str, object]:
    envelope = parse_json(data)
    body = envelope.get("state") if isinstance(envelope, dict) else None
    if not isinstance(envelope, dict) or not isinstance(body, str):
        raise ValueError(f"{_FIGURES} holds no state")
    if hashlib.sha256(body.encode()).hexdigest() != envelope.get("sha256"):
        raise DamagedVersionError(f"{_FIGURES} has another sha256 than when it was saved")
    values = parse_json(body.encode())
    if not isinstance(values, dict):
        raise ValueError(f"{_FIGURES} holds no object")
    return values
