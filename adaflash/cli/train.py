# SPDX-License-Identifier: Apache-2.0
"""`adaflash train`: trains a drafter on a file of samples, without a server, and says what it brought."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash.cli.flags import add_flags, flags_of, given_flags, merge_settings
from adaflash.cli.trainer import checkpoints_of
from adaflash.errors import ConfigError
from adaflash.training.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from adaflash.cli.trainer import CheckpointPair
    from adaflash.training.offline import OfflineResult, ProgressFn
    from adaflash.training.replay import ReplayResult
    from adaflash.training.training_data import TokenSample, TrainingData

# These are about trajectories that come while it trains, and about versions.
_SKIP = (
    "store",
    "spool",
    "state",
    "window_tokens",
    "replay_share",
    "recency_tokens",
    "min_tokens",
    "publish_interval_s",
    "publish_kind",
    "keep_versions",
    "spool_bytes",
    "spool_age_s",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a drafter on a file of samples",
        description="Train a drafter on JSON lines: token_ids with num_prompt_tokens, or a prompt or messages, which "
        "the target answers greedily first. Without a model the embedded demo model is trained for. Reports the "
        "acceptance length on held-out samples before and after.",
    )
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSON lines of samples; needed")
    parser.add_argument("--output", type=Path, metavar="DIR", help="new directory for the drafter; needed")
    parser.add_argument("--holdout", type=float, default=0.1, metavar="SHARE", help="samples to measure on (0.1)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer (default: 256)")
    parser.add_argument("--add-length-head", action="store_true", help="give the drafter a length head")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    add_flags(parser, "training", flags_of(TrainerConfig, skip=_SKIP))


def run(args: argparse.Namespace) -> int:
    """Train and write the drafter; 0 when it was written."""
    from adaflash.cli.console import configure_logging
    from adaflash.training.training_data import read_training_data

    config = config_from(args)
    _check_paths(args)
    if args.max_tokens < 2:
        raise ConfigError(f"max_tokens={args.max_tokens} is invalid: must be >= 2")
    data = read_training_data(args.data)
    configure_logging("WARNING" if args.json else "INFO")
    directories = checkpoints_of(config.model, config.draft)
    samples = [*data.samples, *_answered(data, config, directories, args.max_tokens)]
    with tempfile.TemporaryDirectory(prefix="adaflash-train-") as scratch:
        draft = directories.draft
        if args.add_length_head:
            from adaflash.training.new_length_head import add_length_head

            draft = Path(scratch)
            add_length_head(directories.draft, draft, config.seed)
        result = _train(config, directories.target, draft, samples, args)
    _show(result, args)
    return 0


def config_from(args: argparse.Namespace) -> TrainerConfig:
    """Return the config that flags and environment add up to."""
    flags = flags_of(TrainerConfig, skip=_SKIP)
    given = given_flags(args, flags)
    if args.model_argument is not None:
        if "model" in given:
            raise ConfigError(f"the model is given twice: {args.model_argument!r} and --model {given['model']!r}")
        given["model"] = args.model_argument
    return TrainerConfig.from_mapping(merge_settings(flags, given))


def _check_paths(args: argparse.Namespace) -> None:
    for name in ("data", "output"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is needed")
    if args.output.exists():
        raise ConfigError(f"output={str(args.output)!r} exists: must be a new directory")


def _answered(
    data: TrainingData, config: TrainerConfig, directories: CheckpointPair, max_tokens: int
) -> list[TokenSample]:
    """Have the target answer the prompts, drafting with the drafter as it is."""
    from adaflash.config import EngineConfig
    from adaflash.engine.engine import Engine
    from adaflash.request import SamplingParams
    from adaflash.training.training_data import TokenSample

    if not data.prompts:
        return []
    engine = Engine(
        EngineConfig(
            model=str(directories.target),
            draft=str(directories.draft),
            device=config.device,
            num_threads=config.num_threads,
            max_num_seqs=8,
        )
    )
    with closing(engine):
        outputs = engine.generate(data.prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [
        TokenSample([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
        for output in outputs
    ]


def _train(
    config: TrainerConfig, target: Path, draft: Path, samples: list[TokenSample], args: argparse.Namespace
) -> OfflineResult:
    from adaflash.training.offline import OfflineTraining

    training = OfflineTraining(config, target, draft, samples, args.holdout)
    with _progress() as progress:
        result = training.run(progress)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{args.output.name}.", dir=args.output.parent))
    try:
        training.write(staging)
        staging.chmod(0o755)
        staging.rename(args.output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return result


@contextmanager
def _progress() -> Iterator[ProgressFn | None]:
    from rich.progress import Progress

    from adaflash.cli.console import stderr_console

    console = stderr_console()
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("training", total=None)

        def update(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, total=total, description=f"training, loss {loss:.3f}")

        yield update


def _show(result: OfflineResult, args: argparse.Namespace) -> None:
    if args.json:
        figures = {
            "output": str(args.output),
            "num_steps": result.num_steps,
            "num_samples": result.num_samples,
            "num_held_out": result.num_held_out,
            "num_tokens": result.num_tokens,
            "skipped": result.skipped,
            "num_skipped_batches": result.num_skipped_batches,
            "before": _measured(result.before),
            "after": _measured(result.after),
        }
        print(json.dumps(figures))
        return
    print(
        f"{result.num_samples} samples, {result.num_tokens} response tokens, {result.num_steps} steps -> {args.output}"
    )
    if result.skipped:
        print("skipped: " + ", ".join(f"{count} {reason}" for reason, count in result.skipped.items()))
    for name, measured in (("before", result.before), ("after", result.after)):
        if measured is not None:
            accepted = " ".join(f"{share:.2f}" for share in _accepted(measured))
            print(f"{name}: acceptance length {measured.acceptance_length:.3f}, accepted per position {accepted}")


def _measured(result: ReplayResult | None) -> dict[str, object] | None:
    if result is None:
        return None
    return {"acceptance_length": result.acceptance_length, "accepted_per_position": _accepted(result)}


def _accepted(result: ReplayResult) -> list[float]:
    return [count / max(1, result.num_rounds) for count in result.num_accepted_per_position]
