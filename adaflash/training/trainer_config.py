# SPDX-License-Identifier: Apache-2.0
"""Settings of a trainer: what it trains, how, on which data, and how often it publishes. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from adaflash.config import MIN_TRAJECTORY_BYTES, cache_dir, suggest
from adaflash.errors import ConfigError
from adaflash.training.manifest import Kind

LossName = Literal["ce", "reverse_kl", "forward_kl"]
ClipName = Literal["term", "position", "none"]
WeightingName = Literal["decay", "credit"]


@dataclass(frozen=True)
class TrainerConfig:
    """Everything that decides what a trainer learns and when it publishes.

    Attributes:
        model: Directory of the target in Hugging Face layout; None trains for the embedded demo model.
        draft: Directory of the drafter training starts from; None takes the demo model's own.
        device: `auto` (npu, else cuda, else cpu) or the name of an installed backend.
        num_threads: CPU threads for the training's math; None leaves torch's default.
        store: Directory of the published versions; None is `trainer/store` in the cache folder.
        spool: Directory of the trajectories received; None is `trainer/spool` in the cache folder.
        state: Directory of what a restart continues from; None is `trainer/state` in the cache folder.
        seed: Decides which trajectories and anchors are drawn.
        lr: Learning rate of the drafter; constant after the warm-up.
        warmup_steps: Steps with fresh moments over which the rates rise from 0; 0 for none.
        length_head_lr: Learning rate of the length head.
        weight_decay: Of matrices; norms and biases have none.
        beta1: Decay of AdamW's mean of gradients.
        beta2: Decay of AdamW's mean of squared gradients.
        max_grad_norm: Gradients are scaled down to this norm, the drafter's and the length head's apart.
        trajectories_per_step: Trajectories of an optimizer step.
        anchors_per_trajectory: Draft blocks of each.
        loss: `ce` on the target's most likely token, or mixed with a divergence of the distributions.
        alpha: Weight of the cross-entropy when `loss` is a divergence, in [0, 1].
        clip: Limits each vocabulary `term` of the divergence, each `position`, or `none`.
        clip_nats: Limit of a term, in nats.
        clip_share: Limit of a position, as a share of the batch's weight.
        weighting: How positions of a block count: a fixed `decay`, or `credit` in the expected accepted length.
        decay_gamma: Positions until the weight of `decay` has fallen to 1/e.
        credit_smoothing: In [0, 1]; at 1 the weights of `credit` do not depend on the drafter.
        freeze_context: Leave alone what makes the drafter's context (fc, hidden_norm, k and v projections, k_norm), so
            that context computed by an older version stays valid.
        train_drafter: Train the drafter itself; without, its length head learns alone.
        train_length_head: Train the length head, if there is one.
        window_tokens: Tokens of trajectories kept in memory to draw from; the oldest go first.
        window_bytes: Memory their features may take.
        max_trajectory_tokens: Longer trajectories are skipped.
        replay_share: Share of draws that ignores age, in [0, 1]; the others prefer recent trajectories.
        recency_tokens: Tokens after which a trajectory is drawn half as often.
        min_tokens: Response tokens that must have come before training goes on after a pause.
        max_epochs: Times a response token is an anchor on average, before training pauses until new ones come.
        publish_interval_s: Seconds between versions.
        publish_kind: `DELTA` adds the difference from the version before, for servers that have it.
        keep_versions: Newest good versions kept.
        spool_bytes: Most bytes of trajectories on disk.
        spool_age_s: Trajectories on disk are dropped after this.

    Raises:
        ConfigError: Names the field, its value and what is allowed.
    """

    model: str | None = None
    draft: str | None = None
    device: str = "auto"
    num_threads: int | None = None
    store: str | None = None
    spool: str | None = None
    state: str | None = None
    seed: int = 0
    lr: float = 3e-4
    warmup_steps: int = 50
    length_head_lr: float = 2e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    trajectories_per_step: int = 4
    anchors_per_trajectory: int = 10
    loss: LossName = "reverse_kl"
    alpha: float = 0.8
    clip: ClipName = "term"
    clip_nats: float = 0.5
    clip_share: float = 0.01
    weighting: WeightingName = "credit"
    decay_gamma: float = 7.0
    credit_smoothing: float = 0.5
    freeze_context: bool = False
    train_drafter: bool = True
    train_length_head: bool = True
    window_tokens: int = 200_000
    window_bytes: int = 4 << 30
    max_trajectory_tokens: int = 8192
    replay_share: float = 0.25
    recency_tokens: int = 50_000
    min_tokens: int = 512
    max_epochs: float = 4.0
    publish_interval_s: float = 60.0
    publish_kind: Kind = "FULL"
    keep_versions: int = 4
    spool_bytes: int = 4 << 30
    spool_age_s: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("lr", "length_head_lr"):
            self._check(name, 0 < getattr(self, name) < math.inf, "> 0 and finite")
        for name in ("max_grad_norm", "clip_nats", "clip_share", "decay_gamma"):
            self._check(name, getattr(self, name) > 0, "> 0")
        for name in ("max_epochs", "publish_interval_s", "spool_age_s"):
            self._check(name, getattr(self, name) > 0, "> 0")
        for name in ("alpha", "credit_smoothing", "replay_share"):
            self._check(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in ("beta1", "beta2"):
            self._check(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        self._check("weight_decay", 0 <= self.weight_decay < math.inf, ">= 0")
        self._check("seed", 0 <= self.seed < 2**63, "in [0, 2^63)")
        for name in ("num_threads", "trajectories_per_step", "anchors_per_trajectory", "window_tokens", "window_bytes"):
            self._check(name, getattr(self, name) is None or getattr(self, name) >= 1, ">= 1")
        for name in ("recency_tokens", "min_tokens", "keep_versions"):
            self._check(name, getattr(self, name) >= 1, ">= 1")
        self._check("spool_bytes", self.spool_bytes >= MIN_TRAJECTORY_BYTES, f">= {MIN_TRAJECTORY_BYTES}")
        self._check("warmup_steps", self.warmup_steps >= 0, ">= 0")
        self._check("max_trajectory_tokens", self.max_trajectory_tokens >= 3, ">= 3")

    def _check_types(self) -> None:
        """Refuse values of another type, which a caller in Python can pass: `alpha="0.5"`, `lr=True`, NaN."""
        for name, hint in get_type_hints(TrainerConfig).items():
            value = getattr(self, name)
            choices = get_args(hint)
            if choices and isinstance(choices[0], str):
                self._check(name, value in choices, "one of " + ", ".join(choices))
            elif hint is float:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                self._check(name, is_number and not math.isnan(value), "a number")
            else:
                wanted = choices or (hint,)
                self._check(name, type(value) in wanted, " or ".join(kind.__name__ for kind in wanted))

    def _check(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: must be {allowed}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainerConfig:
        """Build a config from plain keys; an unknown key is an error that names the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown setting {key!r}{suggest(key, known)}")
        return cls(**values)

    @property
    def anchors_per_step(self) -> int:
        """Most draft blocks of an optimizer step."""
        return self.trajectories_per_step * self.anchors_per_trajectory

    def directory(self, name: Literal["store", "spool", "state"]) -> Path:
        """Return the directory of that name, in the cache folder when none is given."""
        given: str | None = getattr(self, name)
        return cache_dir() / "trainer" / name if given is None else Path(given)
