# SPDX-License-Identifier: Apache-2.0
"""The backend's calls against the operator schemas of torch_npu 2.13.0 and 2.10.0.post4; needs no torch_npu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from adaflash_ascend.required_ops import REQUIRED_OPS
from tests.unit.ascend.npu_calls import find_made_arguments, find_problems, find_uses

ROOT = Path(__file__).resolve().parents[3]
BACKEND = ROOT / "backends" / "ascend" / "adaflash_ascend"
DATA = json.loads((Path(__file__).parent / "data" / "npu_schemas.json").read_text())
SCHEMAS = {version: entry["schemas"] for version, entry in DATA.items()}
MADE = find_made_arguments((BACKEND / "attention.py").read_text(encoding="utf-8"))


@pytest.fixture(params=sorted(SCHEMAS))
def schemas(request: pytest.FixtureRequest) -> dict[str, str]:
    found: dict[str, str] = SCHEMAS[request.param]
    return found


def test_both_versions_are_recorded_with_their_source() -> None:
    assert set(SCHEMAS) == {"2.13.0", "2.10.0.post4"}
    assert all(entry["source"] for entry in DATA.values())


def test_every_schema_is_of_the_operator_it_is_filed_under(schemas: dict[str, str]) -> None:
    for name, text in schemas.items():
        schema = torch._C.parse_schema(text)
        assert ".".join(filter(None, (schema.name.rpartition("::")[2], schema.overload_name))) == name


@pytest.mark.parametrize("path", sorted(BACKEND.rglob("*.py")), ids=lambda path: path.name)
def test_calls_fit_the_schemas(path: Path, schemas: dict[str, str]) -> None:
    assert find_problems(path.read_text(encoding="utf-8"), REQUIRED_OPS, schemas, MADE) == []


def test_every_required_operator_is_called() -> None:
    used = {use.op for path in BACKEND.rglob("*.py") for use in find_uses(path.read_text(encoding="utf-8"))}
    assert used == set(REQUIRED_OPS)


def test_results_are_taken_in_the_order_of_the_schemas(schemas: dict[str, str]) -> None:
    expected = {
        "npu_add_rms_norm": 3,  # y, rstd, x1 + x2
        "npu_fused_infer_attention_score": 2,  # out, log-sum-exp
        "npu_rms_norm": 2,  # y, rstd
        "npu_rotary_mul": 1,
        "npu_scatter_pa_kv_cache": 0,
        "npu_swiglu": 1,
        "npu_top_k_top_p": 1,
    }
    assert {name: len(torch._C.parse_schema(schemas[name]).returns) for name in expected} == expected


# ---- the checker finds what is planted -----------------------------------------------------------------------------

NORM = "torch.ops.npu.npu_rms_norm(input=x, gamma=w, epsilon=1e-6)"
ATTEND = (
    "torch.ops.npu.npu_fused_infer_attention_score(query=q, key=k, value=v, actual_seq_lengths=[3], "
    "input_layout='TND', sparse_mode=3, atten_mask=None)"
)


MAKER = "def attention_arguments():\n    return {'query': q, 'key': k, 'value': v, 'input_layout': 'TND'}\n"
ATTEND_MADE = "torch.ops.npu.npu_fused_infer_attention_score(**made, sparse_mode=3)"


def problems_of(source: str, schemas: dict[str, str]) -> list[str]:
    return find_problems(source, REQUIRED_OPS, schemas)


def test_right_calls_pass(schemas: dict[str, str]) -> None:
    assert problems_of(NORM, schemas) == []
    assert problems_of(ATTEND, schemas) == []
    assert problems_of("import torch_npu_like\nhasattr(torch.ops.npu, name)", schemas) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NORM.replace("epsilon", "eps"), "unknown keyword eps"),
        (NORM.replace(", gamma=w", ""), "missing gamma"),
        (NORM.replace("input=x", "x"), "positional arguments"),
        ("torch.ops.npu.npu_rms_norm(**arguments)", "unpacked keywords"),
        (NORM.replace("1e-6", "'small'"), "epsilon='small', but it is float"),
        (ATTEND.replace("TND", "TDN"), "input_layout='TDN', must be one of"),
        (ATTEND.replace("'TND'", "3"), "input_layout=3, but it is str"),
        (ATTEND.replace("'TND'", "None"), "input_layout=None, but it is str"),
        (ATTEND.replace("sparse_mode=3", "sparse_mode=11"), "sparse_mode=11, must be one of"),
        ("torch.ops.npu.npu_gelu(input=x)", "npu_gelu is not in REQUIRED_OPS"),
        ("torch_npu.npu_gelu(input=x)", "npu_gelu is not in REQUIRED_OPS"),
        ("torch_npu.npu.synchronize()", "npu.synchronize is not in REQUIRED_OPS"),
        ("call = torch.ops.npu.npu_rms_norm", "npu_rms_norm is not called where it is named"),
        ("ops = torch.ops.npu", "torch.ops.npu is not in REQUIRED_OPS"),
        ("getattr(torch.ops.npu, name)(x)", "torch.ops.npu is not in REQUIRED_OPS"),
    ],
)
def test_a_wrong_call_is_found(source: str, expected: str, schemas: dict[str, str]) -> None:
    (problem,) = problems_of("\n" + source, schemas)
    assert problem.startswith("line 2: ")
    assert expected in problem


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("'key'", "'keys'", ["unknown keyword keys", "missing key"]),
        ("'value': v, ", "", ["missing value"]),
        ("'TND'", "'NTD'", ["input_layout='NTD', must be one of"]),
    ],
)
def test_unpacked_keywords_are_those_of_the_functions_that_make_them(
    old: str, new: str, expected: list[str], schemas: dict[str, str]
) -> None:
    assert find_problems(ATTEND_MADE, REQUIRED_OPS, schemas, find_made_arguments(MAKER)) == []
    made = find_made_arguments(MAKER.replace(old, new))
    problems = find_problems(ATTEND_MADE, REQUIRED_OPS, schemas, made)
    assert [text in problem for text, problem in zip(expected, problems, strict=True)] == [True] * len(expected)


def test_keywords_that_a_function_does_not_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="must end with the return of a dict display"):
        find_made_arguments("def attention_arguments():\n    return dict(query=q)\n")
    with pytest.raises(AssertionError, match="must name its keys"):
        find_made_arguments("def attention_arguments():\n    return {name: q}\n")


def test_an_argument_that_a_version_lacks_is_found(schemas: dict[str, str]) -> None:
    name = "npu_fused_infer_attention_score"
    older = schemas | {name: schemas[name].replace("int sparse_mode=0, ", "")}
    assert older[name] != schemas[name]
    assert [text.partition(": ")[2] for text in problems_of(ATTEND, older)] == [f"{name}: unknown keyword sparse_mode"]


def test_an_operator_that_a_version_lacks_is_found(schemas: dict[str, str]) -> None:
    older = {name: text for name, text in schemas.items() if name != "npu_rms_norm"}
    assert problems_of(NORM, older) == ["line 1: there is no schema of npu_rms_norm"]
