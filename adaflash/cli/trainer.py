# SPDX-License-Identifier: Apache-2.0
"""`adaflash trainer`: trains a drafter on what servers hand over, and serves its versions to them over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from adaflash.cli.flags import Flag, add_flags, flags_of, given_flags, merge_settings
from adaflash.cli.serve import LOG_LEVELS
from adaflash.config import ServerConfig
from adaflash.errors import ConfigError
from adaflash.training.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from adaflash.rpc.lifecycle import SignalWatch
    from adaflash.rpc.metrics import MetricsEndpoint
    from adaflash.rpc.trainer_server import TrainerServer
    from adaflash.training.trainer import Trainer
    from adaflash.training.trainer_state import StateDirectory
    from adaflash.training.trajectories import TrajectorySpool
    from adaflash.training.weight_store import WeightStore

logger = logging.getLogger(__name__)

# Servers go on with the context rows that older versions wrote (ADR 10).
TRAINER_DEFAULTS: Mapping[str, object] = {"freeze_context": True}
# A server listens beside its trainer, and a trajectory with its features is large.
SERVER_DEFAULTS: Mapping[str, object] = {"grpc_port": 50052, "max_message_bytes": 256 << 20}
# These are about generation.
_SERVER_SKIP = ("served_model_name", "max_num_waiting", "max_stream_buffer_bytes", "shutdown_grace_period_s")
_POLL_S = 0.05
_SECOND_SIGNAL = 128


class TrainerConfigs(NamedTuple):
    """What is trained, and where it is served."""

    trainer: TrainerConfig
    server: ServerConfig


@dataclass(frozen=True)
class TrainerSession:
    """An open trainer and what it holds on disk."""

    trainer: Trainer
    store: WeightStore
    spool: TrajectorySpool
    states: StateDirectory
    target_digest: str

    def close(self) -> None:
        """Let another process use the directories."""
        self.spool.close()
        self.store.close()
        self.states.close()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash trainer`."""
    parser = subparsers.add_parser(
        "trainer",
        help="train a drafter on what servers generate",
        description="Train a drafter on trajectories that servers hand over, and serve its versions to them over gRPC. "
        "Settings come from the command line, else from ADAFLASH_<NAME> variables, else from --config, else from the "
        "defaults. Without a model the embedded demo model is trained for. --api-key is the trainer's own token, which "
        "servers send as their trainer-api-key.",
    )
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of `flag-name: value` lines")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="least severe log lines to show")
    add_flags(parser, "training", trainer_flags())
    add_flags(parser, "server", server_flags())


def trainer_flags() -> list[Flag]:
    """Return the flags of training with what is different online."""
    return flags_of(TrainerConfig, defaults=TRAINER_DEFAULTS)


def server_flags() -> list[Flag]:
    """Return the server's flags with a trainer's defaults."""
    flags = []
    for flag in flags_of(ServerConfig, skip=_SERVER_SKIP):
        if flag.field in SERVER_DEFAULTS:
            text = flag.help.partition(" (default:")[0]
            flag = replace(flag, help=f"{text} (default: {SERVER_DEFAULTS[flag.field]})")
        flags.append(flag)
    return flags


def run(args: argparse.Namespace) -> int:
    """Train and serve until SIGTERM or SIGINT; 0 after a drain."""
    from adaflash.cli.console import configure_logging
    from adaflash.rpc.ports import reserve_ports

    configs = configs_from(args)
    configure_logging(args.log_level.upper())
    with reserve_ports(configs.server):
        session = open_session(configs.trainer)
    try:
        return asyncio.run(serve_trainer(session, configs.server))
    finally:
        session.close()


def configs_from(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> TrainerConfigs:
    """Return the configs that flags, environment and config file add up to."""
    groups = [trainer_flags(), server_flags()]
    flags = [flag for group in groups for flag in group]
    given = given_flags(args, flags)
    if args.model_argument is not None:
        if "model" in given:
            raise ConfigError(f"the model is given twice: {args.model_argument!r} and --model {given['model']!r}")
        given["model"] = args.model_argument
    settings = merge_settings(flags, given, args.config, environ)
    trainer, server = ({f.field: settings[f.field] for f in group if f.field in settings} for group in groups)
    return TrainerConfigs(
        TrainerConfig.from_mapping({**TRAINER_DEFAULTS, **trainer}),
        ServerConfig.from_mapping({**SERVER_DEFAULTS, **server}),
    )


class CheckpointPair(NamedTuple):
    """Directories of a target and of a drafter for it."""

    target: Path
    draft: Path


def checkpoints_of(model: str | None, draft: str | None) -> CheckpointPair:
    """Return the directories of target and drafter; no model means the embedded demo model, which has a drafter.

    Raises:
        ConfigError: A model is given without a drafter.
    """
    from adaflash.cli.console import load_progress
    from adaflash.config import EngineConfig
    from adaflash.engine.loading import resolve_checkpoints

    with load_progress() as progress:
        target, drafter = resolve_checkpoints(EngineConfig(model=model, draft=draft), progress)
    if drafter is None:
        raise ConfigError(f"a drafter is needed for model={model!r}: give --draft")
    return CheckpointPair(target, drafter)


def open_session(config: TrainerConfig) -> TrainerSession:
    """Load what is trained and open its directories.

    Raises:
        AdaFlashError: A checkpoint, a directory or a setting is wrong.
    """
    from adaflash.cli.console import show_summary
    from adaflash.training.trainer import Trainer
    from adaflash.training.trainer_parts import load_parts, open_store
    from adaflash.training.trainer_state import StateDirectory
    from adaflash.training.trajectories import TrajectorySpool

    directories = checkpoints_of(config.model, config.draft)
    parts = load_parts(config, *directories)
    store = open_store(config, directories.draft, parts.target_digest)
    spool = TrajectorySpool(config.directory("spool"), config.spool_bytes, config.spool_age_s)
    states = StateDirectory(config.directory("state"))
    trainer = Trainer(config, parts, store, spool, states)
    status = trainer.status
    summary = {
        "target": directories.target,
        "drafter": directories.draft,
        "target_digest": parts.target_digest[:16],
        "store": store.root,
        "version": status.base_version,
        "train_step": status.train_step,
        "trajectories_on_disk": spool.num_records,
    }
    show_summary("training", summary)
    return TrainerSession(trainer, store, spool, states, parts.target_digest)


class TrainingThread:
    """Runs a trainer beside the event loop.

    Attributes:
        error: What ended it, or None.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._stop = trainer, threading.Event()
        # A second signal must end the process in the middle of a step.
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self.error: Exception | None = None

    def start(self) -> None:
        """Begin to train."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to save its state and end."""
        self._stop.set()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._trainer.run(self._stop)
        except Exception as error:
            self.error = error
            logger.exception("training failed")


async def serve_trainer(session: TrainerSession, config: ServerConfig) -> int:
    """Train and serve until a signal; prints the `ready` line once calls are accepted.

    Returns:
        0 after a drain, 1 when training failed, 128 + signal number when a second signal cut it short.
    """
    from adaflash.rpc.lifecycle import SignalWatch
    from adaflash.rpc.trainer_server import TrainerServer

    watch = SignalWatch()
    watch.install()
    server = TrainerServer(session.store, session.spool, session.target_digest, config)
    metrics = _metrics(session.trainer, config)
    training = TrainingThread(session.trainer)
    try:
        await server.start()
        training.start()
        shown = "" if metrics is None else f" metrics=http://{config.host}:{metrics.port}/metrics"
        print(f"ready address={server.address}{shown}", flush=True)
        return await _until_signalled(server, training, watch)
    finally:
        training.stop()
        if metrics is not None:
            metrics.close()


async def _until_signalled(server: TrainerServer, training: TrainingThread, watch: SignalWatch) -> int:
    while not watch.first.is_set() and training.is_alive:
        await asyncio.sleep(_POLL_S)
    training.stop()
    drain = asyncio.create_task(server.drain())
    while (training.is_alive or not drain.done()) and not watch.second.is_set():
        await asyncio.sleep(_POLL_S)
    if watch.second.is_set():
        logger.warning("shutdown forced: the state is that of the last publication")
        drain.cancel()
        await server.stop()
        return _SECOND_SIGNAL + watch.last_signal
    finished = drain.result()
    logger.info("drained all_finished=%s", finished)
    return 0 if training.error is None else 1


def _metrics(trainer: Trainer, config: ServerConfig) -> MetricsEndpoint | None:
    from prometheus_client import CollectorRegistry

    from adaflash.rpc.metrics import MetricsEndpoint
    from adaflash.training.trainer_metrics import TrainerCollector

    if config.metrics_port is None:
        return None
    registry = CollectorRegistry()
    registry.register(TrainerCollector(lambda: trainer.status))
    return MetricsEndpoint(registry, config.host, config.metrics_port)
