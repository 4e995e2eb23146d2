# SPDX-License-Identifier: Apache-2.0
"""What generated prompts have in common: names of people, lines of data, draws without early repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from adaflash.demo.prompts import DomainPrompt
from adaflash.errors import ConfigError

_DATA: Final = Path(__file__).parent / "data"
T = TypeVar("T")


class Person(NamedTuple):
    """A first name and its pronouns."""

    name: str
    they: str
    them: str
    their: str


_SHE: Final = (
    "Aisha Beatriz Chloe Dana Elif Freya Grace Hana Ingrid Jasmine Keiko Lucia Mei Nadia Olga Priya Rosa Sofia"
)
_HE: Final = (
    "Ahmed Boris Carlos Daniel Emeka Felix George Hiro Ivan Jamal Kofi Leon Mateo Nikhil Omar Pavel Ravi Samuel"
)
PEOPLE: Final = (
    *(Person(name, "she", "her", "her") for name in _SHE.split()),
    *(Person(name, "he", "him", "his") for name in _HE.split()),
)


def distinct(draw: Callable[[], str], count: int, domain: str) -> list[DomainPrompt]:
    """Return the first `count` different prompts that are drawn."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[draw()] = None
    return [DomainPrompt(prompt, domain) for prompt in prompts]


def shuffled_forever(items: list[T], rng: random.Random) -> Iterator[T]:
    """Yield every item once before any again."""
    while True:
        yield from rng.sample(items, len(items))


def read_lines(name: str) -> list[str]:
    """Return the lines of a data file."""
    return (_DATA / name).read_text(encoding="utf-8").splitlines()


def first_kinds(name: str, num_kinds: int | None) -> list[str]:
    """Return the first lines of a data file, or all of them.

    Raises:
        ConfigError: There are not so many.
    """
    kinds = read_lines(name)
    if num_kinds is not None and not 1 <= num_kinds <= len(kinds):
        raise ConfigError(f"num_kinds={num_kinds} is invalid: must be in [1, {len(kinds)}]")
    return kinds[:num_kinds]


def check_count(count: int, most: int) -> None:
    """Raise `ConfigError` unless 0 <= count <= most."""
    if not 0 <= count <= most:
        raise ConfigError(f"count must be in [0, {most}], not {count}")
