# SPDX-License-Identifier: Apache-2.0
"""AdamW over a drafter whose fp32 parameters are the masters: groups, frozen parts, clipping, and its state by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adaflash.errors import ConfigError
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_layers import DrafterLayer
from adaflash.training.trainer_config import TrainerConfig

_HEAD_PREFIX = "length_head."
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class GradientNorms(NamedTuple):
    """Norms before clipping: of the drafter's gradients, and of the length head's; 0 where nothing is trained."""

    drafter: float
    length_head: float


class DrafterOptimizer:
    """Steps a drafter and its length head; they share no gradient, so each is clipped by itself.

    Norms and biases have no weight decay. With `freeze_context` everything that turns target features into context
    keys and values gets no update; k and v rows lie in one matrix with the q rows, so theirs is a zero gradient.

    Args:
        drafter: Its parameters are fp32 and changed in place.
        config: Rates and what is trained.

    Raises:
        ConfigError: Nothing is trained.
    """

    def __init__(self, drafter: DFlashDrafter, config: TrainerConfig) -> None:
        self._drafter, self._config = drafter, config
        for name, parameter in drafter.named_parameters():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: masters are fp32"
            parameter.requires_grad_(self._is_trained(name))
        trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        if not trained:
            raise ConfigError(
                f"train_drafter={config.train_drafter} and train_length_head={config.train_length_head} train nothing: "
                f"this drafter has {'a' if drafter.length_head is not None else 'no'} length head"
            )
        self._parameters: dict[bool, list[nn.Parameter]] = {
            is_head: [p for n, p in trained.items() if n.startswith(_HEAD_PREFIX) == is_head]
            for is_head in (False, True)
        }
        self._frozen_rows = _context_rows(drafter) if config.freeze_context else []
        self._names = {id(p): n for n, p in trained.items()}
        self._optimizer = torch.optim.AdamW(self._groups(trained), lr=config.lr, betas=(config.beta1, config.beta2))

    def step(self, loss: Tensor) -> GradientNorms | None:
        """Step down the gradient of `loss` []; None, and nothing changes, when loss or gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            return None
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, first_row in self._frozen_rows:
            if parameter.grad is not None:
                parameter.grad[first_row:] = 0
        norms = GradientNorms(*(self._clip(self._parameters[is_head]) for is_head in (False, True)))
        if not all(map(math.isfinite, norms)):
            return None
        self._warm_up()
        self._optimizer.step()
        return norms

    def _warm_up(self) -> None:
        """Set the rates of the next step: on few gradients AdamW moves every weight by its rate."""
        states = self._optimizer.state.values()
        num_steps = int(max((float(state["step"]) for state in states), default=0.0))
        share = min(1.0, (num_steps + 1) / max(1, self._config.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = share * group["full_rate"]

    def _clip(self, parameters: list[nn.Parameter]) -> float:
        return float(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm)) if parameters else 0.0

    def reset(self) -> None:
        """Forget the moments: the weights are others now."""
        self._optimizer.state.clear()

    # ---- groups ----------------------------------------------------------------------------------------------

    def _is_trained(self, name: str) -> bool:
        if name.startswith(_HEAD_PREFIX):
            return self._config.train_length_head
        if not self._config.train_drafter:
            return False
        is_context = name.startswith(("fc.", "hidden_norm.")) or ".k_norm." in name
        return not (is_context and self._config.freeze_context)

    def _groups(self, trained: Mapping[str, nn.Parameter]) -> Iterator[dict[str, object]]:
        for rate, is_head in ((self._config.lr, False), (self._config.length_head_lr, True)):
            for decay in (self._config.weight_decay, 0.0):
                members = [
                    parameter
                    for name, parameter in trained.items()
                    if name.startswith(_HEAD_PREFIX) == is_head and self._has_decay(name) == (decay > 0)
                ]
                if members:
                    yield {"params": members, "lr": rate, "full_rate": rate, "weight_decay": decay}
                if self._config.weight_decay == 0:
                    break

    def _has_decay(self, name: str) -> bool:
        if self._config.weight_decay == 0 or name.endswith("bias") or "norm" in name:
            return False
        # Frozen rows must not decay, either.
        return not (self._config.freeze_context and ".qkv_proj." in name)

    # ---- state -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return moments and step counts by `<parameter>/<moment>`; none before the first step."""
        return {
            f"{self._names[id(parameter)]}/{moment}": values[moment]
            for parameter, values in self._optimizer.state.items()
            for moment in _MOMENTS
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned, but no moments of rows that are frozen now: those would go on moving them.

        Raises:
            KeyError: A moment of a parameter is missing.
            ValueError: One has another shape.
        """
        self.reset()
        for parameters in self._parameters.values():
            for parameter in parameters:
                name = self._names[id(parameter)]
                if not any(f"{name}/{moment}" in state for moment in _MOMENTS):
                    continue
                values = {moment: state[f"{name}/{moment}"] for moment in _MOMENTS}
                if not values["exp_avg"].shape == values["exp_avg_sq"].shape == parameter.shape:
                    raise ValueError(f"moments of {name} are of another shape than {list(parameter.shape)}")
                self._optimizer.state[parameter] = {
                    "step": values["step"].clone(),
                    "exp_avg": values["exp_avg"].to(parameter.device).clone(),
                    "exp_avg_sq": values["exp_avg_sq"].to(parameter.device).clone(),
                }
        for parameter, first_row in self._frozen_rows:
            for moment in ("exp_avg", "exp_avg_sq"):
                if parameter in self._optimizer.state:
                    self._optimizer.state[parameter][moment][first_row:] = 0


def _context_rows(drafter: DFlashDrafter) -> list[tuple[nn.Parameter, int]]:
    """Return matrices and biases whose rows from the given one on project keys and values."""
    attentions = [layer.self_attn for layer in drafter.layers if isinstance(layer, DrafterLayer)]
    found = []
    for attention in attentions:
        found.append((attention.qkv_proj.weight, attention.q_size))
        if attention.qkv_proj.bias is not None:
            found.append((attention.qkv_proj.bias, attention.q_size))
    return found
