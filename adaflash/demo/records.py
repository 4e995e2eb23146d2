# SPDX-License-Identifier: Apache-2.0
"""Prompts that ask for a record as JSON, the same for the same seed: structured output, new to the shipped drafter.

Kinds of records come from `data/record_kinds.txt`, one a line: what it is, then its fields and the slots that fill
them.
"""

from __future__ import annotations

import random
from typing import Final

from adaflash.demo.drawing import PEOPLE, check_count, distinct, first_kinds, shuffled_forever
from adaflash.demo.prompts import DomainPrompt

# Far fewer than the kinds can express, so that drawing again after a repeat stays rare.
MAX_RECORD_PROMPTS: Final = 20_000
_REQUESTS: Final = (
    "Write a JSON object for {}. Fields: {}. Data: {}.",
    "Create a JSON object for {}. Fields: {}. Values: {}.",
    "Give me a JSON object for {} with the fields {}. Data: {}.",
)
_SURNAMES: Final = (
    "Costa Diaz Dubois Haddad Kim Larsen Moreno Novak Okafor Olsen Petrov Rossi Sharma Silva Tanaka Weber"
)
_WORDS: Final = {
    "city": "Athens Berlin Boston Cairo Delhi Dublin Lagos Lima Madrid Oslo Paris Rome Sydney Tokyo Toronto",
    "country": "Austria Brazil Canada Egypt France Greece India Italy Japan Kenya Nigeria Norway Peru Spain",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "job": "accountant cook designer driver engineer manager nurse teacher",
    "department": "finance marketing production research sales support",
    "ward": "cardiology neurology oncology pediatrics radiology surgery",
    "subject": "art biology chemistry geography history law music physics",
    "color": "black blue brown gray green red white yellow",
    "pet": "cat dog hamster parrot rabbit turtle",
    "car": "Breeze Comet Falcon Nomad Orion Pioneer Swift Vista",
}
_TITLES: Final = (
    "A Small Kitchen",
    "A Winter Garden",
    "Letters from Home",
    "Stories of the Sea",
    "The Glass Mountain",
    "The Last Lighthouse",
    "The Night Train",
    "The Silent River",
)


def record_prompts(seed: int, count: int, num_kinds: int | None = None) -> list[DomainPrompt]:
    """Return `count` different requests to write a record as a JSON object.

    Every kind is used once before any is used again. A smaller count with the same seed gives the first of them.

    Args:
        seed: Decides everything but which kinds there are.
        count: At most 20,000.
        num_kinds: Use so many of the kinds, a narrower domain; None uses all.

    Raises:
        ConfigError: `count` is not in [0, 20000], or there are not so many kinds.
    """
    check_count(count, MAX_RECORD_PROMPTS)
    rng = random.Random(seed)
    order = shuffled_forever(first_kinds("record_kinds.txt", num_kinds), rng)
    return distinct(lambda: _request(next(order), rng), count, "records")


def _request(kind: str, rng: random.Random) -> str:
    name, _, described = kind.partition(": ")
    fields = [field.split("=") for field in described.split(", ")]
    slots = _draw_slots(rng)
    data = ", ".join(template.format(**slots) for _, template in fields)
    return rng.choice(_REQUESTS).format(name, ", ".join(field for field, _ in fields), data)


def _draw_slots(rng: random.Random) -> dict[str, object]:
    first, surname = rng.choice(PEOPLE).name, rng.choice(_SURNAMES.split())
    return {
        "first": first,
        "full": f"{first} {surname}",
        "email": f"{first.lower()}.{surname.lower()}@mail.com",
        "phone": f"555-{rng.randrange(1000, 10_000)}",
        "few": rng.randrange(2, 10),
        "age": rng.randrange(18, 80),
        "many": rng.randrange(100, 500),
        "year": rng.randrange(1950, 2024),
        "title": rng.choice(_TITLES),
        **{slot: rng.choice(words.split()) for slot, words in _WORDS.items()},
    }
