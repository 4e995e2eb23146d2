# SPDX-License-Identifier: Apache-2.0
"""`adaflash serve`: loads an engine, serves it over gRPC, and drains on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping

from adaflash.cli.flags import add_flags, flags_of, given_flags, merge_settings
from adaflash.config import EngineConfig, ServerConfig
from adaflash.engine.base import EngineClient
from adaflash.errors import ConfigError
from adaflash.request import EngineInfo

LOG_LEVELS = ("debug", "info", "warning", "error")


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


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a drain."""
    from adaflash.cli.console import configure_logging
    from adaflash.rpc.ports import reserve_ports

    engine_config, server_config = configs_from(args)
    configure_logging(args.log_level.upper())
    with reserve_ports(server_config):
        engine = _load(engine_config, server_config)
    return asyncio.run(serve_engine(engine, server_config))


def configs_from(
    args: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configs that flags, environment and config file add up to."""
    engine_flags, server_flags = flags_of(EngineConfig), flags_of(ServerConfig)
    flags = [*engine_flags, *server_flags]
    given = given_flags(args, flags)
    if args.model_argument is not None:
        if "model" in given:
            raise ConfigError(f"the model is given twice: {args.model_argument!r} and --model {given['model']!r}")
        given["model"] = args.model_argument
    settings = merge_settings(flags, given, args.config, environ)
    engine_names = {flag.field for flag in engine_flags}
    engine_settings = {name: value for name, value in settings.items() if name in engine_names}
    server_settings = {name: value for name, value in settings.items() if name not in engine_names}
    return EngineConfig.from_mapping(engine_settings), ServerConfig.from_mapping(server_settings)


def _load(engine_config: EngineConfig, server_config: ServerConfig) -> EngineClient:
    from adaflash.cli.console import load_progress, show_summary
    from adaflash.engine.async_engine import AsyncEngine

    with load_progress() as progress:
        engine = AsyncEngine(engine_config, max_num_waiting=server_config.max_num_waiting, progress=progress)
    show_summary("serving", summary_of(engine.info))
    return engine


async def serve_engine(engine: EngineClient, config: ServerConfig) -> int:
    """Serve a loaded engine until a signal, then close it; prints the `ready` line once calls are accepted."""
    from adaflash.rpc.lifecycle import SignalWatch, run_until_signalled
    from adaflash.rpc.server import GrpcServer

    watch = SignalWatch()
    watch.install()
    try:
        server = GrpcServer(engine, config)
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
