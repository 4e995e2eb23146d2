# SPDX-License-Identifier: Apache-2.0
"""Derives command-line flags from the config dataclasses, and merges flags, environment and config file."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from adaflash.config import ENV_PREFIX, environment_overrides, suggest
from adaflash.errors import ConfigError

# Spellings of vLLM and SGLang for the same thing; each is accepted as a flag and as a config key.
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("model_path",),
    "draft": ("speculative_draft_model_path",),
    "tokenizer": ("tokenizer_path",),
    "max_model_len": ("context_length",),
    "max_num_seqs": ("max_running_requests",),
    "gpu_memory_utilization": ("mem_fraction_static",),
    "block_size": ("page_size",),
    "num_speculative_tokens": ("speculative_num_draft_tokens",),
    "seed": ("random_seed",),
    "shutdown_timeout_s": ("shutdown_timeout",),
    "shutdown_grace_period_s": ("grpc_shutdown_grace_period",),
}
_NONE = ("none", "null")


class FieldType:
    """What values a dataclass field takes, and how text becomes one.

    Args:
        hint: The field's resolved type hint.
    """

    def __init__(self, hint: object) -> None:
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        self.is_optional = type(None) in options
        self._options = [option for option in options if option is not type(None)]
        self.choices: tuple[str, ...] = ()
        if get_origin(self._options[0]) is Literal:
            self.choices = get_args(self._options[0])

    @property
    def is_bool(self) -> bool:
        """Whether the field is a switch."""
        return self._options == [bool]

    @property
    def item_type(self) -> type | None:
        """Type of the items when the field takes a list, else None."""
        lists = [option for option in self._options if get_origin(option) is list]
        return get_args(lists[0])[0] if lists else None

    @property
    def name(self) -> str:
        """The type as a user reads it."""
        return self._name_when_given + (" or none" if self.is_optional else "")

    @property
    def _name_when_given(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        if self.item_type is not None:
            return f"a list, each item {names[self.item_type]}"
        # A mapping's hint is an alias such as dict[int, float], which is in no table of types.
        return names.get(self._options[0], 'a JSON object such as {"5": -1.5}')

    def parse(self, text: str) -> object:
        """Return the value `text` spells; raises ValueError saying what is allowed."""
        if self.is_optional and text.lower() in _NONE:
            return None
        if self.is_bool:
            return _parse_bool(text)
        if self.choices or self._options == [str]:
            return self.check(text)
        if self.item_type is not None:
            return self.check([self.item_type(item) for item in text.split(",")])
        if self._options[0] in (int, float):
            return self._parse_number(text)
        return self._parse_mapping(text)

    def _parse_number(self, text: str) -> object:
        try:
            return int(text) if self._options == [int] else float(text)
        except ValueError:
            raise ValueError(f"must be {self.name}") from None

    def _parse_mapping(self, text: str) -> dict[int, float]:
        try:
            return {int(key): float(value) for key, value in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):  # No JSON, no such keys or values, no object.
            raise ValueError(f"must be {self.name}") from None

    def check(self, value: object) -> object:
        """Return a value that came typed, e.g. from YAML; raises ValueError when it is of another type."""
        if self.is_optional and (value is None or (isinstance(value, str) and value.lower() in _NONE)):
            return None
        if self.choices:
            valid = value in self.choices
        elif self.item_type is not None:
            valid = isinstance(value, list) and all(type(item) is self.item_type for item in value)
        elif self._options == [float]:
            valid = type(value) in (int, float)
        else:
            valid = type(value) is self._options[0]
        if not valid:
            raise ValueError(f"must be {self.name}")
        return value


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


@dataclass(frozen=True)
class Flag:
    """One field of a config dataclass, as a flag.

    Attributes:
        field: Name of the dataclass field.
        type: What it takes.
        help: The field's line in the dataclass's docstring, with the default.
    """

    field: str
    type: FieldType
    help: str

    @property
    def names(self) -> tuple[str, ...]:
        """The field's name and its aliases."""
        return (self.field, *ALIASES.get(self.field, ()))

    @property
    def options(self) -> list[str]:
        """The flags on the command line."""
        return ["--" + name.replace("_", "-") for name in self.names]


def flags_of(
    config_class: type[Any], skip: Iterable[str] = (), defaults: Mapping[str, object] | None = None
) -> list[Flag]:
    """Return the flags of a config dataclass, in the order of its fields.

    Args:
        config_class: The dataclass.
        skip: Fields that are no flags here.
        defaults: What a command uses instead of a field's own default, by field; shown in the help.
    """
    hints = get_type_hints(config_class)
    docs = attribute_docs(config_class)
    flags = []
    for field in dataclasses.fields(config_class):
        if field.name not in skip:
            default = (defaults or {}).get(field.name, field.default)
            shown = "" if default in (None, dataclasses.MISSING) else f" (default: {default})"
            flags.append(Flag(field.name, FieldType(hints[field.name]), docs[field.name] + shown))
    return flags


def attribute_docs(config_class: type[Any]) -> dict[str, str]:
    """Return the `Attributes:` section of a class's docstring, joined to one line per attribute."""
    # Python strips the indentation of docstrings since 3.13.
    section = inspect.cleandoc(config_class.__doc__ or "").partition("Attributes:")[2]
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        match = re.match(r"^ {4}(\w+): (.*)$", line)
        if match:
            name, docs[match[1]] = match[1], match[2]
        elif re.match(r"^\S", line):  # the next section
            break
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add flags to a parser as one group; a flag that is not given leaves no trace in the namespace."""
    group = parser.add_argument_group(title)
    for flag in flags:
        text = flag.help.replace("%", "%%")
        if flag.type.is_bool:
            group.add_argument(
                *flag.options,
                dest=flag.field,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            _add_value_flag(group, flag, text)


def _add_value_flag(group: argparse._ArgumentGroup, flag: Flag, text: str) -> None:
    metavar = "{" + ",".join(flag.type.choices) + "}" if flag.type.choices else flag.field.rsplit("_", 1)[-1].upper()
    item_type = flag.type.item_type
    group.add_argument(
        *flag.options,
        dest=flag.field,
        type=item_type or _argument_type(flag.type.parse),
        action="store" if item_type is None else "append",
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=text,
    )


def _argument_type(parse: Callable[[str], object]) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is invalid: {error}") from error

    return convert


def given_flags(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, object]:
    """Return the values that were on the command line, by field."""
    return {flag.field: getattr(args, flag.field) for flag in flags if hasattr(args, flag.field)}


def merge_settings(
    flags: Iterable[Flag],
    given: Mapping[str, object],
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the settings that are given anywhere, by field: command line over environment over config file.

    Raises:
        ConfigError: A key is unknown or a value of the wrong type; names the source and the nearest known key.
    """
    by_field = {flag.field: flag for flag in flags}
    settings = {} if config_file is None else read_config_file(config_file, by_field.values())
    for field, text in environment_overrides(by_field, environ).items():
        try:
            settings[field] = by_field[field].type.parse(text)
        except ValueError as error:
            raise ConfigError(f"{ENV_PREFIX}{field.upper()}={text!r} is invalid: {error}") from error
    return {**settings, **given}


def read_config_file(path: str, flags: Iterable[Flag]) -> dict[str, object]:
    """Return the settings of a YAML file of `flag-name: value` lines, by field; keys as on the command line."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path!r} cannot be read: {error}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"config file {path!r} must hold `name: value` lines")
    known = {name: flag for flag in flags for name in flag.names}
    settings: dict[str, object] = {}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            spelling = "_" if "_" in str(key) else "-"
            hint = suggest(str(key), (known_name.replace("_", spelling) for known_name in known))
            raise ConfigError(f"config file {path!r}: unknown key {key!r}{hint}")
        flag = known[name]
        if flag.field in settings:
            raise ConfigError(f"config file {path!r}: {key!r} gives {flag.field!r} twice")
        try:
            settings[flag.field] = flag.type.check(value)
        except ValueError as error:
            raise ConfigError(f"config file {path!r}: {key}={value!r} is invalid: {error}") from error
    return settings
