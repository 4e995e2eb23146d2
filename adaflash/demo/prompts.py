# SPDX-License-Identifier: Apache-2.0
"""Prompts for demo and benchmarks: the embedded ones by domain, or a user's JSON lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from adaflash.errors import ConfigError

_EMBEDDED = Path(__file__).parent / "data" / "prompts.jsonl"


class DomainPrompt(NamedTuple):
    """One user message and the kind of text it asks for."""

    prompt: str
    domain: str


def demo_prompts(domain: str | None = None) -> list[DomainPrompt]:
    """Return the embedded prompts, of one domain (`code`, `maths`, `chat`, `other`) or all of them.

    Raises:
        ConfigError: No prompt is of that domain.
    """
    return read_prompts(_EMBEDDED, domain)


def read_prompts(path: Path, domain: str | None = None) -> list[DomainPrompt]:
    """Read prompts from JSON lines: an object with `prompt` and, optionally, `domain` on each line.

    Raises:
        ConfigError: The file is missing, a line is malformed, or nothing is left.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    domains = sorted({prompt.domain for prompt in prompts})
    chosen = [prompt for prompt in prompts if domain in (None, prompt.domain)]
    if not chosen:
        raise ConfigError(f"{path} holds no prompt of domain {domain!r}; it has: {', '.join(domains) or 'none at all'}")
    return chosen


def _parse(line: str, where: str) -> DomainPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: must be an object with a non-empty string 'prompt'")
    domain = record.get("domain", "other")
    if not isinstance(domain, str):
        raise ConfigError(f"{where}: 'domain' must be a string, not {domain!r}")
    return DomainPrompt(prompt, domain)
