# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of the demo model with the target's features, kept in a folder: what `adaptation` trains on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaflash.config import EngineConfig
from adaflash.demo.prompts import DomainPrompt, demo_prompts
from adaflash.demo.records import record_prompts
from adaflash.demo.traffic import code_prompts, maths_prompts
from adaflash.engine.engine import Engine
from adaflash.models.digest import target_digest
from adaflash.ops.backend import Backend
from adaflash.request import ChatMessage, RequestOutput, SamplingParams
from adaflash.training.blocks import TrainingSequence
from adaflash.training.supervision import Supervision, Supervisor
from adaflash.training.target_head import TargetHead
from adaflash.training.trajectories import Trajectory

# Domains that are new to the shipped drafter; code is the one it knows.
NEW_DOMAINS: dict[str, Callable[[int, int], list[DomainPrompt]]] = {"maths": maths_prompts, "records": record_prompts}
# Answered together: on the CPU a larger batch costs little more.
PROMPTS_PER_FILE = 20
MAX_MODEL_LEN = 1024


class Deadline:
    """Ends the program between two pieces of work once its time is up; None: never."""

    def __init__(self, limit_s: float | None) -> None:
        self._end = None if limit_s is None else time.monotonic() + limit_s

    def check(self) -> None:
        """End the program when the time is up."""
        if self._end is not None and time.monotonic() > self._end:
            raise SystemExit("the time limit is reached: the same command goes on from here")


class SetSizes(NamedTuple):
    """Answers of each set and tokens of an answer.

    Attributes:
        train: Answers of the new domain to train on.
        heldout: Answers of the new domain to replay.
        code: Code answers to replay, to the embedded prompts first.
        replay: Code answers to mix into training.
        max_tokens: Limit of an answer.
    """

    train: int
    heldout: int
    code: int
    replay: int
    max_tokens: int


class RecordedAnswers:
    """Answers by the name of their set; what is missing is recorded when it is asked for.

    Sets are `<domain>` and `code` to replay, `<domain>_train` and `code_train` to train on.

    Args:
        domain: The new domain, a key of `NEW_DOMAINS`.
        folder: Where they are kept; a file of other prompts, target or limit ends the program.
        sizes: Of the sets.
        model: The demo model's directory.
        head: Its embedding and LM head.
        backend: Where it runs.
        tap_layer_ids: Layers whose output is kept.
        deadline: Checked before a file is recorded.
    """

    def __init__(
        self,
        domain: str,
        folder: Path,
        sizes: SetSizes,
        model: Path,
        head: TargetHead,
        backend: Backend,
        tap_layer_ids: tuple[int, ...],
        deadline: Deadline,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.domain, self.sizes, self.digest = domain, sizes, target_digest(model)
        self._folder, self._deadline = folder, deadline
        self._supervisor = Supervisor(model, head, backend, tap_layer_ids, self.digest, MAX_MODEL_LEN)
        self._sets: dict[str, list[Supervision]] = {}

    def __getitem__(self, name: str) -> list[Supervision]:
        if name not in self._sets:
            self._sets[name] = self._load(name)
        return self._sets[name]

    @cached_property
    def _engine(self) -> Engine:
        """Answers prompts by plain decoding; loaded when a first answer is missing."""
        return Engine(
            EngineConfig(device="cpu", verify_policy="off", max_num_seqs=PROMPTS_PER_FILE, max_model_len=MAX_MODEL_LEN)
        )

    def _prompts(self, name: str) -> list[str]:
        sizes = self.sizes
        if name.removesuffix("_train") == self.domain:
            prompts = [prompt.prompt for prompt in NEW_DOMAINS[self.domain](0, sizes.heldout + sizes.train)]
            return prompts[: sizes.heldout] if name == self.domain else prompts[sizes.heldout :]
        embedded = [prompt.prompt for prompt in demo_prompts("code")][: sizes.code]
        num_more = sizes.code - len(embedded)
        tasks = [prompt.prompt for prompt in code_prompts(0, num_more + sizes.replay)]
        return embedded + tasks[:num_more] if name == "code" else tasks[num_more:]

    def _load(self, name: str) -> list[Supervision]:
        prompts, supervisions = self._prompts(name), []
        for first in range(0, len(prompts), PROMPTS_PER_FILE):
            path = self._folder / f"{name}-{first:04d}.safetensors"
            part = prompts[first : first + PROMPTS_PER_FILE]
            described = self._described(part)
            if not path.exists():
                self._deadline.check()
                self._record(part, path, described)
            with safe_open(path, "pt") as file:
                found = file.metadata()
            if found != described:
                raise SystemExit(f"{path} was recorded otherwise ({found}, not {described}): give another --data")
            supervisions += _unpacked(load_file(path))
        return supervisions

    def _described(self, prompts: list[str]) -> dict[str, str]:
        digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
        return {"prompts": digest, "target": self.digest, "max_tokens": str(self.sizes.max_tokens)}

    def _record(self, prompts: list[str], path: Path, described: dict[str, str]) -> None:
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=self.sizes.max_tokens)
        replies = self._engine.generate([[ChatMessage("user", prompt)] for prompt in prompts], params)
        tensors: dict[str, Tensor] = {}
        for index, reply in enumerate(replies):
            item = self._supervisor.supervise(self._trajectory(reply))
            named = {"token_ids": item.sequence.token_ids, "mask": item.sequence.response_mask}
            named |= {"taps": item.taps, "hidden": item.hidden, "top1": item.top1}
            tensors |= {f"{index:04d}.{name}": tensor.contiguous() for name, tensor in named.items()}
        unfinished = path.with_suffix(".tmp")
        save_file(tensors, unfinished, described)
        unfinished.replace(path)
        print(f"recorded {path.name}: {len(prompts)} answers, {time.perf_counter() - started:.1f} s", flush=True)

    def _trajectory(self, reply: RequestOutput) -> Trajectory:
        prompt = list(reply.prompt_token_ids)
        token_ids = prompt + reply.outputs[0].token_ids
        return Trajectory(reply.request_id, 0, token_ids, len(prompt), [], 0, self.digest, 0.0)


def _unpacked(tensors: Mapping[str, Tensor]) -> list[Supervision]:
    """Return what `RecordedAnswers` wrote, in order."""
    names = sorted({key.partition(".")[0] for key in tensors})
    return [
        Supervision(
            TrainingSequence(tensors[f"{name}.token_ids"], tensors[f"{name}.mask"]),
            tensors[f"{name}.taps"],
            tensors[f"{name}.hidden"],
            tensors[f"{name}.top1"],
        )
        for name in names
    ]
