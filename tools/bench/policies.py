# SPDX-License-Identifier: Apache-2.0
"""Verify policies compared in one run: each serves the same endless requests, in turns of a fraction of a second.

One in-process engine per arm, each with the same model and drafter. Requests never run out: the next one starts when
one ends, so a fixed number is always running. The arms take turns in random order; a round is one turn of every arm, so
whatever else the machine does meets all arms alike, and intervals come from resampling whole rounds.

Usage: python tools/bench/policies.py [--concurrency 1 4 16 32] [--seconds S] [--arms off fixed:3 ...]
       [--domains mixed|maths|records|code|chat|shift] [--drafter demo|random|zero|DIR] [--temperature T] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file
from turns import Round, Row, Slice, show, summarize

from adaflash.cli.environment import environment
from adaflash.cli.measure import BenchRequest, chat_request
from adaflash.config import EngineConfig, VerifyPolicyName
from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.demo.prompts import demo_prompts
from adaflash.demo.records import record_prompts
from adaflash.demo.traffic import code_prompts, maths_prompts
from adaflash.engine.engine import Engine
from adaflash.errors import AdaFlashError, ConfigError
from adaflash.request import SamplingParams, SpeculationStats

ARMS = ("off", "fixed:1", "fixed:3", "fixed:7", "confidence", "length_head", "goodput")
# By time: the domains of the requests, interleaved; with two entries the second holds from half time on.
PHASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "mixed": (("code", "maths", "chat"),),
    "maths": (("maths",),),
    "records": (("records",),),
    "code": (("code",),),
    "chat": (("chat",),),
    "shift": (("code",), ("maths",)),
}
OUTPUT_TOKENS = 64
MAX_MODEL_LEN = 256
NUM_PROMPTS = 1000  # of a domain that has so many; then they repeat, with other seeds
_ARGUMENTS = {
    "fixed": "num_speculative_tokens",
    "confidence": "confidence_threshold",
    "length_head": "length_head_rate",
}


class Traffic:
    """The endless requests, the same for every arm.

    Args:
        domains: A key of `PHASES`.
        temperature: Of all requests.
        seed: Decides prompts and the requests' seeds.
    """

    def __init__(self, domains: str, temperature: float, seed: int) -> None:
        self.phases = PHASES[domains]
        self._temperature, self._seed = temperature, seed
        self._prompts = {
            "code": [p.prompt for p in code_prompts(seed, NUM_PROMPTS)],
            "maths": [p.prompt for p in maths_prompts(seed, NUM_PROMPTS)],
            "records": [p.prompt for p in record_prompts(seed, NUM_PROMPTS)],
            "chat": [p.prompt for p in demo_prompts("chat")],
        }

    def request(self, index: int, phase: int, max_tokens: int = OUTPUT_TOKENS) -> BenchRequest:
        """Return the request with number `index`."""
        domains = self.phases[phase]
        prompts = self._prompts[domains[index % len(domains)]]
        prompt = prompts[index // len(domains) % len(prompts)]
        seed = self._seed * 1_000_003 + index
        params = SamplingParams(temperature=self._temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        return chat_request(prompt, params)


class Arm:
    """An engine under one policy, and the requests it is serving.

    Args:
        name: See `arm_config`.
        config: What its engine loads.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self._engine = Engine(config)
        self._running: dict[str, SpeculationStats | None] = {}  # None until the first token
        self._next = 0

    def start(self, traffic: Traffic, concurrency: int, warmup_s: float) -> None:
        """Serve the first requests, until all are decoding and `warmup_s` more have passed.

        The first ones have limits from small to full, so that prefills do not come in bursts for ever after.
        """
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running, self._next = {}, 0
        for index in range(concurrency):
            self._add(traffic.request(index, 0, -(-OUTPUT_TOKENS * (index + 1) // concurrency)))
        while None in self._running.values():
            self.run(traffic, 0, 0.0)
        if warmup_s:
            self.run(traffic, 0, warmup_s)

    def run(self, traffic: Traffic, phase: int, seconds: float) -> Slice:
        """Step for at least `seconds` and once at least; what ends is replaced by the next request at once."""
        counts = Slice()
        started = perf_counter()
        while True:
            step = self._step(traffic, phase)
            elapsed = perf_counter() - started
            counts = Slice.total((counts, step))._replace(seconds=elapsed)
            if elapsed >= seconds:
                return counts

    def _step(self, traffic: Traffic, phase: int) -> Slice:
        num_tokens = rounds = emitted = verified = drafted = 0
        for delta in self._engine.step():
            before, after = self._running[delta.request_id] or SpeculationStats(), delta.speculation
            num_tokens += sum(len(output.token_ids) for output in delta.outputs)
            rounds += after.num_rounds - before.num_rounds
            emitted += after.num_emitted_tokens - before.num_emitted_tokens
            verified += after.num_verified_tokens - before.num_verified_tokens
            drafted += after.num_drafted_tokens - before.num_drafted_tokens
            self._running[delta.request_id] = after
            if delta.finished:
                del self._running[delta.request_id]
                self._add(traffic.request(self._next, phase))
        return Slice(0.0, num_tokens, rounds, emitted, verified, int(rounds > 0), int(drafted > 0))

    def _add(self, request: BenchRequest) -> None:
        self._running[self._engine.add_request(request.prompt, request.params)] = None
        self._next += 1


def arm_config(arm: str, base: EngineConfig) -> EngineConfig:
    """Return `base` with the policy of an arm: its name, and after a colon its parameter (`fixed:3`, `confidence:0.5`).

    Raises:
        ConfigError: The engine does not know the policy, or it takes no such parameter.
    """
    policy, colon, argument = arm.partition(":")
    known = [name for name in get_args(VerifyPolicyName) if name != "auto"]
    if policy not in known:
        raise ConfigError(f"arm={arm!r} is invalid: this engine knows the policies {', '.join(known)}")
    values: dict[str, Any] = {**asdict(base), "verify_policy": policy}
    if colon:
        if policy not in _ARGUMENTS:
            raise ConfigError(f"arm={arm!r} is invalid: must be {policy!r}, which takes no parameter")
        try:
            values[_ARGUMENTS[policy]] = int(argument) if policy == "fixed" else float(argument)
        except ValueError as error:
            raise ConfigError(f"arm={arm!r} is invalid: {_ARGUMENTS[policy]}={argument!r} is no number") from error
    return EngineConfig.from_mapping(values)


def write_drafter(kind: str, directory: Path, seed: int) -> None:
    """Write the demo drafter with other weights: `random` ones of the usual size, or `zero`."""
    shutil.copy(demo_drafter_dir() / "config.json", directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(demo_drafter_dir() / "model.safetensors")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = tensor.dim() == 1 and name.endswith("weight")
        weights = is_norm + noise * (0.1 if tensor.dim() == 1 else tensor.shape[1] ** -0.5)
        tensors[name] = (weights if kind == "random" else torch.zeros_like(weights)).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors")


def measure(arms: Sequence[Arm], traffic: Traffic, concurrency: int, args: argparse.Namespace) -> list[Round]:
    """Let the arms take turns until they have had `args.seconds` each on average; warm-up is not counted."""
    order = list(arms)
    shuffled = random.Random(args.seed)
    for arm in order:
        arm.start(traffic, concurrency, args.warmup)
    rounds: list[Round] = []
    total, limit = 0.0, args.seconds * len(arms)
    while total < limit or rounds[-1].phase + 1 < len(traffic.phases):
        phase = min(int(total / limit * len(traffic.phases)), len(traffic.phases) - 1)
        shuffled.shuffle(order)
        slices = {arm.name: arm.run(traffic, phase, args.slice) for arm in order}
        rounds.append(Round(phase, slices))
        total += sum(part.seconds for part in slices.values())
    return rounds


def add_turn_flags(parser: argparse.ArgumentParser, arms: Sequence[str]) -> None:
    """Add the flags that `measure` reads, `arms` being the default ones."""
    parser.add_argument("--arms", nargs="+", default=list(arms), help="policy, or policy:parameter as in fixed:3")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--seconds", type=float, default=30.0, help="for every arm, at every concurrency")
    parser.add_argument("--slice", type=float, default=0.7, help="seconds of a turn at least")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds of every arm that are not counted")
    parser.add_argument("--seed", type=int, default=0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_turn_flags(parser, ARMS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafter", default="demo", help="demo, random or zero weights, or a drafter's directory")
    parser.add_argument("--domains", choices=list(PHASES), default="mixed", help="shift: code, from half time on maths")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if len(set(args.arms)) != len(args.arms):
        parser.error(f"--arms {' '.join(args.arms)}: every arm once")
    if min(args.concurrency) < 1 or args.seconds <= 0 or args.slice < 0 or args.warmup < 0 or args.seed < 0:
        parser.error("--concurrency and --seconds must be positive, --slice, --warmup and --seed not negative")
    return args


def _drafter_directory(kind: str, scratch: Path, seed: int) -> Path:
    if kind == "demo":
        return demo_drafter_dir()
    if kind not in ("random", "zero"):
        return Path(kind)
    write_drafter(kind, scratch, seed)
    return scratch


def _load(args: argparse.Namespace, draft: Path) -> list[Arm]:
    base = EngineConfig(
        model=str(demo_model_dir()),
        draft=str(draft),
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(args.concurrency),
        enable_prefix_caching=False,
    )
    configs = {name: arm_config(name, base) for name in args.arms}  # every name is checked before anything is loaded
    arms = [Arm(name, config) for name, config in configs.items()]
    print(f"{len(arms)} engines, {_resident_gb():.1f} GB resident", flush=True)
    return arms


def _resident_gb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def _report(args: argparse.Namespace, rows: Sequence[Row], rounds: dict[int, list[Round]]) -> dict[str, object]:
    slices = {
        str(concurrency): [
            {"phase": turn.phase, **{name: part._asdict() for name, part in turn.slices.items()}} for turn in turns
        ]
        for concurrency, turns in rounds.items()
    }
    arguments = {**vars(args), "json": str(args.json)}
    listed = [
        {**asdict(row), "to_off": row.to_off and row.to_off._asdict(), "to_best": row.to_best._asdict()} for row in rows
    ]
    return {"rows": listed, "slices": slices, "arguments": arguments, "environment": environment()}


def main() -> None:
    """Measure every concurrency and print one table each."""
    args = _arguments()
    rows: list[Row] = []
    rounds: dict[int, list[Round]] = {}
    try:
        traffic = Traffic(args.domains, args.temperature, args.seed)
        with tempfile.TemporaryDirectory() as scratch:
            arms = _load(args, _drafter_directory(args.drafter, Path(scratch), args.seed))
        for concurrency in args.concurrency:
            rounds[concurrency] = measure(arms, traffic, concurrency, args)
            parts = {"all": rounds[concurrency]}
            if len(traffic.phases) > 1:
                parts["shifted"] = [turn for turn in rounds[concurrency] if turn.phase == len(traffic.phases) - 1]
            for phase, turns in parts.items():
                rows += summarize(args.arms, turns, concurrency, phase, args.seed)
                show(rows[-len(arms) :])
    except AdaFlashError as error:
        sys.exit(f"error: {error}")
    if args.json is not None:
        report = _report(args, rows, rounds)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
