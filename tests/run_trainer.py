# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny drafter for a number of steps in its own process, so that a test can kill it; see `main`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Never

import torch
from safetensors.torch import save_file

from tests.training_setups import TrainingSetup, open_trainer

STEPS_PER_VERSION = 4


def _die(*_: object) -> Never:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL ends it")


def main() -> None:
    """Continue to `num_steps`, publish after every few steps, then write masters and moments to `result`.

    With `killed_at` it ends at that step, between saving its state and publishing.
    """
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    setup = TrainingSetup(Path(settings["target"]), Path(settings["drafter"]))
    running = open_trainer(setup, Path(settings["root"]))
    running.trainer.take_new()
    sys.stdout.write(f"ready {running.trainer.status.train_step}\n")
    sys.stdout.flush()
    publish = running.store.publish
    while True:
        step = running.trainer.status.train_step
        if step and step % STEPS_PER_VERSION == 0:
            running.store.publish = _die if step == settings.get("killed_at") else publish  # type: ignore[method-assign]
            running.trainer.publish()  # again after a restart: the step's key makes it one version
        if step >= settings["num_steps"]:
            break
        running.trainer.step()
    save_file({name: tensor.contiguous() for name, tensor in running.parts.learner.state().items()}, settings["result"])
    running.close()


if __name__ == "__main__":
    main()
