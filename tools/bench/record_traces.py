# SPDX-License-Identifier: Apache-2.0
"""What a drafter would propose at every position of recorded greedy answers: traces for `adaflash simulate --traces`.

The demo model answers maths and code prompts once (`recorded_answers.py`; kept in --data, shared with `adaptation.py`).
At every position of every answer the drafter then drafts a whole block; confidences, the number of leading drafts that
are right, and the length head's prediction are kept. Answers of both kinds take turns.

Usage: python tools/bench/record_traces.py --data DIR --out FILE.npz [--drafter DIR] [--num-maths N] [--num-code N]
       [--max-tokens N] [--threads N] [--time-limit S]
"""

from __future__ import annotations

import argparse
import time
from itertools import zip_longest
from pathlib import Path

import torch
from recorded_answers import Deadline, RecordedAnswers, SetSizes

from adaflash.demo.drafter import demo_drafter_dir
from adaflash.demo.model import demo_model_dir
from adaflash.ops.backend import Backend
from adaflash.ops.registry import load_backend
from adaflash.simulate.acceptance import Answer, write_answers
from adaflash.speculative.dflash import DFlashDrafter
from adaflash.speculative.drafter_config import load_drafter_config
from adaflash.training.learner import Learner
from adaflash.training.replay import draft_at
from adaflash.training.supervision import Supervision
from adaflash.training.target_head import TargetHead
from adaflash.training.trainer_config import TrainerConfig


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="record what a drafter proposes everywhere in greedy answers")
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded answers, made when missing")
    parser.add_argument("--out", type=Path, required=True, help="npz file, replaced")
    parser.add_argument("--drafter", type=Path, help="directory of a drafter for the demo model; default: the shipped")
    parser.add_argument("--num-maths", type=int, default=40, help="maths answers; default: 40")
    parser.add_argument("--num-code", type=int, default=24, help="code answers; default: 24")
    parser.add_argument("--max-tokens", type=int, default=80, help="of an answer; default: 80")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--time-limit", type=float, help="seconds after which nothing new is recorded")
    args = parser.parse_args()
    for name in ("num_maths", "num_code", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is invalid: must be >= 1")
    if args.out.suffix != ".npz":
        parser.error(f"--out {args.out} is invalid: must end in .npz")
    return args


def trace(drafter: DFlashDrafter, recorded: Supervision) -> Answer | None:
    """Return what the drafter proposes at every position of an answer but its last; None where that is the first."""
    sequence = recorded.sequence
    num_prompt_tokens = len(sequence.token_ids) - int(sequence.response_mask.sum())
    anchors = torch.arange(num_prompt_tokens, len(sequence.token_ids) - 1)
    if not len(anchors):
        return None
    drafts = draft_at(drafter, sequence, recorded.taps, anchors)
    ratio = drafts.length_ratio
    return Answer(
        num_prompt_tokens,
        drafts.confidence.clamp(0, 1).numpy(),
        drafts.num_matched.numpy(),
        None if ratio is None else ratio.numpy(),
    )


def main() -> None:
    """Record what is missing, draft everywhere, and write the traces."""
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    directory, backend, model = args.drafter or demo_drafter_dir(), load_backend("cpu"), demo_model_dir()
    head = TargetHead(model, backend)
    drafter = Learner(directory, head, Backend(backend.device), TrainerConfig(train_length_head=False)).drafter
    sizes = SetSizes(train=1, heldout=args.num_maths, code=args.num_code, replay=1, max_tokens=args.max_tokens)
    taps = load_drafter_config(directory).tap_layer_ids
    answers = RecordedAnswers("maths", args.data, sizes, model, head, backend, taps, Deadline(args.time_limit))
    maths, code = answers["maths"], answers["code"]
    started = time.perf_counter()
    turns = [recorded for pair in zip_longest(maths, code) for recorded in pair if recorded is not None]
    traced = [answer for recorded in turns if (answer := trace(drafter, recorded)) is not None]
    write_answers(args.out, traced)
    num_anchors = sum(len(answer.num_matched) for answer in traced)
    print(f"wrote {args.out}: {len(traced)} answers, {num_anchors} blocks, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
