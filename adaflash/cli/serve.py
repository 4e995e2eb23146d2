# SPDX-License-Identifier: Apache-2.0
"""`adaflash serve`: loads an engine, serves it over gRPC, learns from a trainer if there is one, drains on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from adaflash.cli.flags import add_flags, flags_of, given_flags, merge_settings
from adaflash.config import EngineConfig, OnlineConfig, ServerConfig
from adaflash.engine.base import EngineClient
from adaflash.errors import ConfigError
from adaflash.request import EngineInfo

if TYPE_CHECKING:
    from adaflash.engine.async_engine import AsyncEngine
    from adaflash.rpc.online import OnlineLearning

LOG_LEVELS = ("debug", "info", "warning", "error")


class ServeConfigs(NamedTuple):
    """What is loaded, how it is reached, and what it learns from."""

    engine: EngineConfig
    server: ServerConfig
    online: OnlineConfig


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serve a model over gRPC. Settings come from the command line, else from ADAFLASH_<NAME> "
        "variables, else from --config, else from the defaults. Without a model the embedded demo model is served.",
    )
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of `flag-name: value` lines")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="least severe log lines to show")
    add_flags(parser, "engine", flags_of(EngineConfig))
    add_flags(parser, "server", flags_of(ServerConfig))
    add_flags(parser, "online learning", flags_of(OnlineConfig))


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a drain."""
    from adaflash.cli.console import configure_logging
    from adaflash.rpc.ports import reserve_ports

    configs = configs_from(args)
    configure_logging(args.log_level.upper())
    with reserve_ports(configs.server):
        online = _prepare_online(configs)
        engine = _load(configs, online)
    return asyncio.run(serve_engine(engine, configs.server, online))


def configs_from(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServeConfigs:
    """Return the configs that flags, environment and config file add up to."""
    groups = [flags_of(config) for config in (EngineConfig, ServerConfig, OnlineConfig)]
    flags = [flag for group in groups for flag in group]
    given = given_flags(args, flags)
    if args.model_argument is not None:
        if "model" in given:
            raise ConfigError(f"the model is given twice: {args.model_argument!r} and --model {given['model']!r}")
        given["model"] = args.model_argument
    settings = merge_settings(flags, given, args.config, environ)
    engine, server, online = (
        {flag.field: settings[flag.field] for flag in group if flag.field in settings} for group in groups
    )
    return ServeConfigs(
        EngineConfig.from_mapping(engine), ServerConfig.from_mapping(server), OnlineConfig.from_mapping(online)
    )


def _prepare_online(configs: ServeConfigs) -> OnlineLearning | None:
    if configs.online.trainer is None:
        return None
    from adaflash.cli.console import load_progress
    from adaflash.rpc.online import OnlineLearning, default_server_id

    server_id = configs.online.server_id or default_server_id(configs.server.grpc_port)
    with load_progress() as progress:
        return OnlineLearning(configs.online, configs.engine, server_id, progress)


def _load(configs: ServeConfigs, online: OnlineLearning | None) -> AsyncEngine:
    from adaflash.cli.console import load_progress, show_summary
    from adaflash.engine.async_engine import AsyncEngine

    capture = None if online is None else online.capture
    with load_progress() as progress:
        engine = AsyncEngine(configs.engine, configs.server.max_num_waiting, progress, capture=capture)
    show_summary("serving", summary_of(engine.info))
    return engine


async def serve_engine(engine: EngineClient, config: ServerConfig, online: OnlineLearning | None = None) -> int:
    """Serve a loaded engine until a signal, then close it; prints the `ready` line once calls are accepted.

    Args:
        engine: What generates.
        config: Where it is served.
        online: What it learns from, made for this engine, an `AsyncEngine`; closed on return.
    """
    try:
        return await _serve(engine, config, online)
    finally:
        if online is not None:
            await online.close()


async def _serve(engine: EngineClient, config: ServerConfig, online: OnlineLearning | None) -> int:
    from adaflash.engine.async_engine import AsyncEngine
    from adaflash.rpc.lifecycle import SignalWatch, finish_unless_signalled, run_until_signalled
    from adaflash.rpc.online_metrics import OnlineCollector
    from adaflash.rpc.server import GrpcServer

    watch = SignalWatch()
    watch.install()
    try:
        server = GrpcServer(engine, config, [] if online is None else [OnlineCollector(online)])
        if online is not None:
            assert isinstance(engine, AsyncEngine), "what learns online is an AsyncEngine"
            if not await finish_unless_signalled(online.start(engine), watch):
                await engine.close()
                return 0
        await server.start()
    except BaseException:
        await engine.close()
        raise
    metrics = "" if server.metrics_address is None else f" metrics=http://{server.metrics_address}/metrics"
    print(f"ready address={server.address}{metrics}", flush=True)
    return await run_until_signalled(server, engine, config, watch)


def summary_of(info: EngineInfo) -> dict[str, object]:
    """Return what is active, in the order in which it is shown."""
    ops = Counter(info.op_table.values())
    reference = [name for name, kind in info.op_table.items() if kind != "native"]
    return {
        "model": info.model,
        "drafter": info.draft or "none",
        "drafter_version": "none" if info.drafter_version is None else info.drafter_version,
        "device": info.device,
        "dtype": info.dtype,
        "verify_policy": info.verify_policy,
        "draft_block_size": info.draft_block_size or "none",
        "sampling_coupling": info.sampling_coupling,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_blocks": f"{info.num_kv_blocks}x{info.block_size}",
        "native_ops": ops["native"],
        "reference_ops": ",".join(reference) or "none",
    }
