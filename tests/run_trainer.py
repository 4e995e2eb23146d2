# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny drafter for a number of steps in its own process, so that a test can kill it; see `main`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.training_setups import TrainingSetup, open_trainer

STEPS_PER_VERSION = 4


def main() -> None:
    """Continue to `num_steps`, publish after every few steps, then write masters and moments to `result`."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    setup = TrainingSetup(Path(settings["target"]), Path(settings["drafter"]))
    running = open_trainer(setup, Path(settings["root"]))
    running.trainer.take_new()
    sys.stdout.write(f"ready {running.trainer.status.train_step}\n")
    sys.stdout.flush()
    while running.trainer.status.train_step < settings["num_steps"]:
        running.trainer.step()
        if running.trainer.status.train_step % STEPS_PER_VERSION == 0:
            running.trainer.publish()
    save_file({name: tensor.contiguous() for name, tensor in running.parts.learner.state().items()}, settings["result"])
    running.close()


if __name__ == "__main__":
    main()
