# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to the requests of `policies.Traffic`, and what the demo drafter proposes everywhere in them."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from policies import MAX_MODEL_LEN, OUTPUT_TOKENS, Traffic
from record_traces import trace

from adaflash.config import EngineConfig
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.durable_files import replace_file
from adaflash.engine.engine import Engine
from adaflash.models.digest import target_digest
from adaflash.ops.backend import Backend
from adaflash.ops.registry import load_backend
from adaflash.request import RequestOutput
from adaflash.simulate.acceptance import Answer, RepeatedAnswers, read_answers, write_answers
from adaflash.speculative.drafter_config import load_drafter_config
from adaflash.training.learner import Learner
from adaflash.training.supervision import Supervisor
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import TrainerConfig
from adaflash.training.trajectories import Trajectory

# Answered together: on the CPU a larger batch costs little more.
_BATCH = 32


class TrafficAnswers:
    """Answers in the order in which traffic hands out its requests; from a file as far as it has them.

    They are decoded plainly in a batch. Where two tokens are nearly as likely an engine that computes other rows
    together may answer otherwise.

    Args:
        traffic: Of one phase, greedy.
        path: An npz file as `adaflash simulate --traces` reads it, beside it a JSON file that says what it holds; None
            keeps nothing.
    """

    def __init__(self, traffic: Traffic, path: Path | None) -> None:
        self._traffic, self._path = traffic, path
        self._num_drafts = load_drafter_config(demo_drafter_dir()).draft_block_size - 1

    def first(self, num_answers: int) -> RepeatedAnswers:
        """Return the answers to the first requests; what is missing is recorded.

        Raises:
            ConfigError: The file cannot be read.
        """
        described = self._described(num_answers)
        kept = self._kept(described)
        if len(kept) < num_answers:
            kept += self._record(range(len(kept), num_answers))
            if self._path is not None:
                write_answers(self._path, kept)
                replace_file(self._path.with_suffix(".json"), json.dumps(described).encode())
        return RepeatedAnswers(kept[:num_answers])

    def _described(self, num_answers: int) -> dict[str, object]:
        weights = (demo_drafter_dir() / "model.safetensors").read_bytes()
        requests = (self._traffic.request(index, 0) for index in range(num_answers))
        return {
            "target": target_digest(demo_model_dir()),
            "drafter": hashlib.sha256(weights).hexdigest(),
            "requests": [hashlib.sha256(repr(request).encode()).hexdigest()[:16] for request in requests],
        }

    def _kept(self, described: dict[str, object]) -> list[Answer]:
        """Return what the file has; a file of other requests or models ends the program."""
        if self._path is None or not self._path.exists():
            return []
        try:
            found = json.loads(self._path.with_suffix(".json").read_bytes())
            requests, wanted = list(found.pop("requests")), described["requests"]
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(f"{self._path}: what it holds is unknown ({error}): give another --answers") from error
        assert isinstance(wanted, list), "requests are listed"
        num_common = min(len(requests), len(wanted))
        is_same = requests[:num_common] == wanted[:num_common]
        if not is_same or any(described[name] != value for name, value in found.items()):
            raise SystemExit(f"{self._path} was recorded of other requests or models: give another --answers")
        answers = read_answers(self._path, self._num_drafts)
        return [answers[index] for index in range(len(answers))]

    def _record(self, indices: range) -> list[Answer]:
        started = time.perf_counter()
        model, directory = demo_model_dir(), demo_drafter_dir()
        backend = load_backend("cpu")
        head, taps = TargetHead(model, backend), load_drafter_config(directory).tap_layer_ids
        digest = target_digest(model)
        supervisor = Supervisor(model, head, backend, taps, digest, MAX_MODEL_LEN)
        drafter = Learner(directory, head, Backend(backend.device), TrainerConfig(train_length_head=False)).drafter
        answers = []
        for reply in self._replies(indices):
            prompt, response = list(reply.prompt_token_ids), reply.outputs[0].token_ids
            assert len(response) == OUTPUT_TOKENS, "requests ignore the end of the text"
            item = Trajectory(reply.request_id, 0, prompt + response, len(prompt), [], 0, digest, 0.0)
            answer = trace(drafter, supervisor.supervise(item))
            assert answer is not None, "the answer has several tokens"
            answers.append(answer)
        print(f"recorded {len(answers)} answers, {time.perf_counter() - started:.1f} s", flush=True)
        return answers

    def _replies(self, indices: range) -> list[RequestOutput]:
        config = EngineConfig(
            model=str(demo_model_dir()),
            device="cpu",
            verify_policy="off",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=_BATCH,
            enable_prefix_caching=False,
        )
        requests = [self._traffic.request(index, 0) for index in indices]
        return Engine(config).generate([r.prompt for r in requests], [r.params for r in requests])
