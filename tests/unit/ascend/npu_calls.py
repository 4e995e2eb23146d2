# SPDX-License-Identifier: Apache-2.0
"""Finds calls of torch_npu's operators in source text, and what is wrong with them by the operators' schemas."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

OPS_NAMESPACE = "torch.ops.npu"
LIBRARY = "torch_npu"

# What an operator's documentation allows where its schema says only `str` or `int`.
ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "input_layout": (
        "TND",
        "BSH",
        "BSND",
        "BNSD",
        "BNSD_BSND",
        "BSH_NBSD",
        "BSND_NBSD",
        "BNSD_NBSD",
        "TND_NTD",
        "NTD_TND",
    ),
    "cache_mode": ("Norm", "PA_NZ"),
    "rotary_mode": ("half", "interleave"),
    "sparse_mode": (0, 1, 2, 3, 4),
}

# Functions that return keyword arguments of an operator, and of its variants, as a dict display.
ATTENTION = "npu_fused_infer_attention_score"
ARGUMENT_MAKERS = {"attention_arguments": ATTENTION, "length_arguments": ATTENTION}
VARIANTS = {f"{ATTENTION}.out": ATTENTION, f"_{ATTENTION}_get_max_workspace": ATTENTION}

_LITERALS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


class Use(NamedTuple):
    """An operator in the source: its name, overload included, and its call; None when it is not called in place."""

    line: int
    op: str
    call: ast.Call | None


def find_uses(source: str) -> list[Use]:
    """Return every use of an operator, in the order of the source."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked = {id(arg) for call in calls.values() if _path(call.func) == "hasattr" for arg in call.args}
    uses = []
    for node in ast.walk(tree):
        path = None if id(node) in inner | asked else _path(node)
        if path is None or not (path + ".").startswith((OPS_NAMESPACE + ".", LIBRARY + ".")):
            continue
        op = path.removeprefix(OPS_NAMESPACE).removeprefix(LIBRARY).removeprefix(".")
        uses.append(Use(node.lineno, op, calls.get(id(node))))
    return sorted(uses, key=lambda use: use.line)


def _path(node: ast.AST) -> str | None:
    """Return `a.b.c` of an attribute chain, or None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _path(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def find_made_arguments(source: str) -> dict[str, dict[str, ast.expr]]:
    """Return, for each operator with `ARGUMENT_MAKERS` in the source, the keywords they return."""
    made: dict[str, dict[str, ast.expr]] = {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name in ARGUMENT_MAKERS:
            display = function.body[-1].value if isinstance(function.body[-1], ast.Return) else None
            assert isinstance(display, ast.Dict), f"{function.name} must end with the return of a dict display"
            for key, value in zip(display.keys, display.values, strict=True):
                assert isinstance(key, ast.Constant), f"{function.name} must name its keys"
                made.setdefault(ARGUMENT_MAKERS[function.name], {})[str(key.value)] = value
    return made


def find_problems(
    source: str,
    required_ops: Collection[str],
    schemas: Mapping[str, str],
    made: Mapping[str, Mapping[str, ast.expr]] | None = None,
) -> list[str]:
    """Return what is wrong with the uses of operators in `source`, each with its line.

    Args:
        source: Python source text.
        required_ops: Names that may be used.
        schemas: Schema of each operator, as `name(Tensor x, *, int y=0) -> Tensor`.
        made: Keywords of operators that may be called with unpacked ones, which are taken to be these.
    """
    problems, made = [], made or {}
    for line, op, call in find_uses(source):
        if op not in required_ops:
            problems.append(f"line {line}: {op or OPS_NAMESPACE} is not in REQUIRED_OPS")
        elif op not in schemas:
            problems.append(f"line {line}: there is no schema of {op}")
        elif call is None:
            problems.append(f"line {line}: {op} is not called where it is named")
        else:
            unpacked = made.get(VARIANTS.get(op, op), {})
            problems += [f"line {line}: {op}: {text}" for text in _call_problems(call, schemas[op], unpacked)]
    return problems


def _call_problems(call: ast.Call, schema: str, unpacked: Mapping[str, ast.expr]) -> Iterator[str]:
    arguments = {argument.name: argument for argument in torch._C.parse_schema(schema).arguments}
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if len(given) < len(call.keywords):
        if not unpacked:
            yield "unpacked keywords"
            return
        given |= unpacked
    if call.args:
        yield "positional arguments"
        return
    for name, value in given.items():
        if name not in arguments:
            yield f"unknown keyword {name}"
        elif isinstance(value, ast.Constant):
            yield from _literal_problems(name, value.value, str(arguments[name].type))
    for name, argument in arguments.items():
        if name not in given and not argument.has_default_value():
            yield f"missing {name}"


def _literal_problems(name: str, value: object, type_name: str) -> Iterator[str]:
    """Check a literal against the argument's type, `Optional[...]` for one that may be None, and documented values."""
    is_optional = type_name.startswith("Optional[")
    inner = type_name.removeprefix("Optional[").removesuffix("]") if is_optional else type_name
    if value is None:
        if not is_optional:
            yield f"{name}=None, but it is {type_name}"
    elif type(value) not in _LITERALS.get(inner, ()):
        yield f"{name}={value!r}, but it is {type_name}"
    elif name in ALLOWED_VALUES and value not in ALLOWED_VALUES[name]:
        yield f"{name}={value!r}, must be one of {', '.join(map(repr, ALLOWED_VALUES[name]))}"
