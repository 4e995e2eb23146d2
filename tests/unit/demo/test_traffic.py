# SPDX-License-Identifier: Apache-2.0
"""Generated prompts: different, repeatable, readable."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaflash.demo import traffic
from adaflash.demo.prompts import DomainPrompt, demo_prompts
from adaflash.demo.records import record_prompts
from adaflash.errors import ConfigError

Generator = Callable[[int, int], list[DomainPrompt]]
GENERATORS = pytest.mark.parametrize(
    ("generate", "domain"),
    [(traffic.maths_prompts, "maths"), (traffic.code_prompts, "code"), (record_prompts, "records")],
    ids=["maths", "code", "records"],
)
DATA = Path(traffic.__file__).parent / "data"
SEEDS = st.integers(0, 2**32)


@GENERATORS
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_a_thousand_prompts_are_different_and_of_bounded_length(generate: Generator, domain: str, seed: int) -> None:
    prompts = generate(seed, 1000)
    assert {prompt.domain for prompt in prompts} == {domain}
    assert len({prompt.prompt for prompt in prompts}) == 1000
    assert all(50 <= len(prompt.prompt) <= 400 for prompt in prompts)


@GENERATORS
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, fewer=st.integers(0, 200))
def test_the_same_seed_gives_the_same_prompts_whatever_the_count(
    generate: Generator, domain: str, seed: int, fewer: int
) -> None:
    assert generate(seed, fewer) == generate(seed, 200)[:fewer]


@GENERATORS
def test_another_seed_gives_other_prompts(generate: Generator, domain: str) -> None:
    assert len(set(generate(1, 100)) & set(generate(2, 100))) < 10


@GENERATORS
def test_every_prompt_is_whole_sentences(generate: Generator, domain: str) -> None:
    for prompt, _ in generate(3, 1000):
        assert not re.search(r"[{}]|  |\b1 \w+s\b|\.\.", prompt), prompt
        assert prompt[0].isupper() or prompt[0].isdigit(), prompt
        assert prompt[-1] in ".?", prompt


def test_word_problems_use_every_template_before_any_again() -> None:
    templates = (DATA / "maths_templates.txt").read_text(encoding="utf-8").splitlines()
    assert len(templates) == len(set(templates)) >= 40
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template))) for template in templates]
    prompts = [prompt for prompt, _ in traffic.maths_prompts(5, len(templates))]
    assert all(any(pattern.search(prompt) for prompt in prompts) for pattern in patterns)


def test_code_prompts_use_every_task_before_any_again() -> None:
    tasks = (DATA / "code_tasks.txt").read_text(encoding="utf-8").splitlines()
    assert len(tasks) == len(set(tasks)) >= 60
    prompts = [prompt for prompt, _ in traffic.code_prompts(5, len(tasks))]
    assert all(sum(task in prompt for prompt in prompts) >= 1 for task in tasks)


def test_all_code_prompts_there_are_can_be_asked_for_and_no_more() -> None:
    most = int(re.search(r"\[0, (\d+)\]", _refusal(traffic.code_prompts, -1)).group(1))  # type: ignore[union-attr]
    assert len(set(traffic.code_prompts(0, most))) == most > 1000
    assert f"not {most + 1}" in _refusal(traffic.code_prompts, most + 1)


def test_a_count_out_of_range_is_refused() -> None:
    assert "count must be in [0, 20000], not -1" in _refusal(traffic.maths_prompts, -1)
    assert "count must be in [0, 20000], not 20001" in _refusal(traffic.maths_prompts, 20001)


def test_no_generated_prompt_is_one_of_the_embedded_ones() -> None:
    embedded = {prompt.prompt for prompt in demo_prompts()}
    generated = traffic.maths_prompts(0, 2000) + traffic.code_prompts(0, 2000) + record_prompts(0, 2000)
    assert not embedded & {prompt for prompt, _ in generated}


def _refusal(generate: Generator, count: int) -> str:
    with pytest.raises(ConfigError) as refused:
        generate(0, count)
    return str(refused.value)


def test_fewer_templates_make_a_narrower_domain() -> None:
    lines = (DATA / "maths_templates.txt").read_text(encoding="utf-8").splitlines()[:2]
    shapes = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(line))) for line in lines]
    narrow = traffic.maths_prompts(3, 40, num_kinds=2)
    assert len({prompt.prompt for prompt in narrow}) == 40
    assert all(any(shape.search(prompt.prompt) for shape in shapes) for prompt in narrow)
    assert not all(any(shape.search(prompt.prompt) for shape in shapes) for prompt in traffic.maths_prompts(3, 40))


def test_records_use_every_kind_before_any_again_and_give_a_value_for_each_field() -> None:
    kinds = (DATA / "record_kinds.txt").read_text(encoding="utf-8").splitlines()
    names = [kind.partition(": ")[0] for kind in kinds]
    assert len(names) == len(set(names)) >= 12
    shape = re.compile(r".* JSON object for (.+?)(?:\. Fields: | with the fields )(.+?)\. (?:Data|Values): (.+)\.")
    found = [shape.fullmatch(prompt) for prompt, _ in record_prompts(5, len(kinds))]
    assert sorted(match[1] for match in found if match is not None) == sorted(names)
    for prompt, _ in record_prompts(6, 500):
        match = shape.fullmatch(prompt)
        assert match is not None
        assert match[2].count(", ") == match[3].count(", ") >= 3, prompt


def test_fewer_kinds_of_records_make_a_narrower_domain() -> None:
    first = (DATA / "record_kinds.txt").read_text(encoding="utf-8").splitlines()[0].partition(": ")[0]
    assert all(f"for {first}" in prompt for prompt, _ in record_prompts(3, 40, num_kinds=1))
    with pytest.raises(ConfigError, match=r"num_kinds=13 is invalid: must be in \[1, 12\]"):
        record_prompts(0, 1, num_kinds=13)
    with pytest.raises(ConfigError, match=r"count must be in \[0, 20000\], not -1"):
        record_prompts(0, -1)
