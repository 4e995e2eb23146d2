# SPDX-License-Identifier: Apache-2.0
"""`adaflash generate`: streams the continuation of a prompt, from a server or from an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adaflash.cli.flags import add_flags, flags_of, given_flags, merge_settings
from adaflash.config import ENV_PREFIX, EngineConfig, environment_overrides
from adaflash.errors import ConfigError
from adaflash.request import ChatMessage, CompletionOutput, Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from adaflash.rpc.client import ClientTls

# A prompt on a terminal asks for more than the 16 tokens an API call gets.
_DEFAULTS = {"max_tokens": 256}
# `--seed` is the request's here.
_ENGINE_SKIP = ("seed",)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `adaflash generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Stream the continuation of a prompt to stdout, from a server when --address is given, else from "
        "an engine loaded in this process.",
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - or nothing reads stdin")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message; needs --chat")
    parser.add_argument("--json", action="store_true", help="print the whole reply as one JSON object")
    client = parser.add_argument_group("server")
    client.add_argument("--address", metavar="HOST:PORT", help="server to ask")
    client.add_argument("--api-key", metavar="KEY", help=f"bearer token; else {ENV_PREFIX}API_KEY")
    client.add_argument("--tls", action="store_true", help="connect with TLS")
    client.add_argument("--ssl-ca-certs", metavar="FILE", help="PEM authorities to trust; needs --tls")
    client.add_argument("--ssl-certfile", metavar="FILE", help="PEM certificate to present; needs --tls")
    client.add_argument("--ssl-keyfile", metavar="FILE", help="PEM key of the certificate; needs --tls")
    client.add_argument("--timeout", metavar="S", type=float, help="seconds the request may take")
    add_flags(parser, "sampling", flags_of(SamplingParams, defaults=_DEFAULTS))
    add_flags(parser, "engine, without --address", flags_of(EngineConfig, skip=_ENGINE_SKIP))


def run(args: argparse.Namespace) -> int:
    """Generate and print; 0 when the request ran to its end."""
    prompt, params = prompt_from(args), params_from(args)
    return asyncio.run(_generate(args, prompt, params))


def prompt_from(args: argparse.Namespace) -> Prompt:
    """Return the prompt of the command line or of stdin."""
    if args.system is not None and not args.chat:
        raise ConfigError("--system has no effect without --chat")
    text: str = args.prompt or "-"
    if text == "-":
        if args.prompt is None and sys.stdin.isatty():
            raise ConfigError("a prompt is needed: give PROMPT, or - to type one and end it with Ctrl-D")
        text = sys.stdin.read()
    if not args.chat:
        return text
    system = [] if args.system is None else [ChatMessage("system", args.system)]
    return [*system, ChatMessage("user", text)]


def params_from(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the command line."""
    given = {**_DEFAULTS, **given_flags(args, flags_of(SamplingParams))}
    return SamplingParams(**given)  # type: ignore[arg-type]  # the flags parsed them, the fields validate themselves


async def _generate(args: argparse.Namespace, prompt: Prompt, params: SamplingParams) -> int:
    from adaflash.engine.merge import OutputMerger

    merger = OutputMerger()
    async with _deltas(args, prompt, params) as deltas:
        async for delta in deltas:
            merger.add(delta)
            if not args.json and params.n == 1:
                print("".join(output.text for output in delta.outputs), end="", flush=True)
    result = merger.result()
    if args.json:
        print(json.dumps(reply_as_json(result)))
    elif params.n == 1:
        print()
    else:
        for output in result.outputs:
            print(f"[{output.index}] {output.text}")
    return 0


@asynccontextmanager
async def _deltas(
    args: argparse.Namespace, prompt: Prompt, params: SamplingParams
) -> AsyncIterator[AsyncIterator[RequestOutput]]:
    engine_flags = flags_of(EngineConfig, skip=_ENGINE_SKIP)
    given = given_flags(args, engine_flags)
    if args.address is None:
        if args.api_key or args.timeout or args.tls:
            raise ConfigError("--api-key, --timeout and --tls have no effect without --address")
        settings = merge_settings(engine_flags, given)
        deltas = _engine_deltas(EngineConfig.from_mapping(settings), prompt, params)
    elif given:
        raise ConfigError(f"{', '.join(given)} has no effect with --address: the server has its own settings")
    else:
        deltas = _server_deltas(args, prompt, params)
    async with aclosing(deltas):
        yield deltas


async def _server_deltas(
    args: argparse.Namespace, prompt: Prompt, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    from adaflash.rpc.client import GenerateClient

    api_key = args.api_key or environment_overrides(["api_key"]).get("api_key")
    async with (
        GenerateClient(args.address, api_key=api_key, tls=tls_from(args)) as client,
        aclosing(client.generate_stream(prompt, params, timeout_s=args.timeout)) as deltas,
    ):
        async for delta in deltas:
            yield delta


async def _engine_deltas(
    config: EngineConfig, prompt: Prompt, params: SamplingParams
) -> AsyncGenerator[RequestOutput, None]:
    from adaflash.cli.console import configure_logging, load_progress
    from adaflash.engine.async_engine import AsyncEngine

    configure_logging("WARNING")
    with load_progress() as progress:
        engine = AsyncEngine(config, progress=progress)
    try:
        stream = engine.generate(prompt, params)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta
    finally:
        await engine.close()


def tls_from(args: argparse.Namespace) -> ClientTls | None:
    """Return how to connect, None for plaintext."""
    from adaflash.rpc.client import ClientTls

    files = (args.ssl_ca_certs, args.ssl_certfile, args.ssl_keyfile)
    if not args.tls:
        if any(files):
            raise ConfigError("--ssl-ca-certs, --ssl-certfile and --ssl-keyfile have no effect without --tls")
        return None
    ca_certs, certificate, private_key = (None if path is None else _read(path) for path in files)
    return ClientTls(ca_certs, certificate, private_key)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error}") from error


def reply_as_json(output: RequestOutput) -> dict[str, object]:
    """Return a reply as plain values."""
    return {
        "request_id": output.request_id,
        "outputs": [_completion_as_json(completion) for completion in output.outputs],
        "usage": output.usage._asdict(),
        "speculation": {
            **dataclasses.asdict(output.speculation),
            "acceptance_length": output.speculation.acceptance_length,
        },
    }


def _completion_as_json(completion: CompletionOutput) -> dict[str, object]:
    values = dataclasses.asdict(completion)
    if completion.logprobs is not None:
        values["logprobs"] = [
            {"chosen": entry.chosen._asdict(), "top": [item._asdict() for item in entry.top]}
            for entry in completion.logprobs
        ]
    return values
