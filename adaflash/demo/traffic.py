# SPDX-License-Identifier: Apache-2.0
"""Many different prompts of one domain, the same for the same seed: for sessions that look at adaptation.

The shipped drafter knows requests for code; word problems are new to it. Word problems come from
`data/maths_templates.txt`, one template a line whose slots `_draw_slots` fills; requests for code from
`data/code_tasks.txt`, one task a line, each asked for in many ways.
"""

from __future__ import annotations

import itertools
import random
from typing import Final

from adaflash.demo.drawing import PEOPLE, check_count, distinct, first_kinds, read_lines, shuffled_forever
from adaflash.demo.prompts import DomainPrompt

# Far fewer than the templates can express, so that drawing again after a repeat stays rare.
MAX_MATHS_PROMPTS: Final = 20_000
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "toys": ("marbles", "stickers", "stamps", "trading cards", "seashells", "toy cars", "beads", "postcards", "dice"),
    "treats": ("muffins", "cookies", "pretzels", "cupcakes", "biscuits", "doughnuts", "brownies", "scones", "waffles"),
    "plants": ("tulips", "tomatoes", "sunflowers", "roses", "strawberries", "lettuces", "peppers", "marigolds"),
    "clothes": ("T-shirts", "scarves", "hats", "jumpers", "belts", "caps", "raincoats"),
    "animals": ("cows", "goats", "sheep", "horses", "donkeys", "ponies", "llamas"),
    "shop": ("bakery", "market stall", "small café", "supermarket", "kiosk", "school canteen", "corner shop"),
    "place": (
        "the library",
        "the community centre",
        "the museum",
        "the youth club",
        "the sports hall",
        "the town hall",
    ),
    "event": (
        "concert",
        "school play",
        "film festival",
        "puppet show",
        "charity gala",
        "science fair",
        "football final",
    ),
    "big_item": ("bicycle", "guitar", "tablet", "camera", "skateboard", "telescope", "sewing machine", "game console"),
}
_STEPWISE: Final = (
    "{} Solve this step by step.",
    "{} Work it out step by step.",
    "{} Explain every step of your solution.",
    "{} Show all the steps and then give the final answer.",
    "{} Think step by step.",
    "{} Please show your working, one step at a time.",
    "Solve this problem step by step. {}",
    "Here is a word problem; explain each step as you solve it. {}",
)

_REQUESTS: Final = (
    "Write a Python function that {}.",
    "Implement a small Python function that {}.",
    "I need a Python function that {}.",
    "Can you write a Python function that {}?",
    "Please show me a Python function that {}.",
    "In Python, write a function that {}.",
    "Help me write a Python function that {}.",
    "How would you write a Python function that {}?",
    "For a code review, write a clean Python function that {}.",
    "Give me a short, readable Python function that {}.",
)
_WISHES: Final = (
    "",
    " Add type hints.",
    " Include a docstring with one example.",
    " Explain how it works in one or two sentences.",
    " Add two assert statements that test it.",
    " Mention one edge case that it handles.",
    " Say what its time complexity is.",
    " Add a comment to every important line.",
)


def maths_prompts(seed: int, count: int, num_kinds: int | None = None) -> list[DomainPrompt]:
    """Return `count` different grade-school word problems, each of which asks for a solution in steps.

    Every template is used once before any is used again. A smaller count with the same seed gives the first of them.

    Args:
        seed: Decides everything but which templates there are.
        count: At most 20,000.
        num_kinds: Use so many of the templates, a narrower domain; None uses all.

    Raises:
        ConfigError: `count` is not in [0, 20000], or there are not so many templates.
    """
    check_count(count, MAX_MATHS_PROMPTS)
    rng = random.Random(seed)
    templates = shuffled_forever(first_kinds("maths_templates.txt", num_kinds), rng)
    return distinct(lambda: rng.choice(_STEPWISE).format(next(templates).format(**_draw_slots(rng))), count, "maths")


def code_prompts(seed: int, count: int) -> list[DomainPrompt]:
    """Return `count` different requests for a small Python function.

    Every task is used once before any is used again. A smaller count with the same seed gives the first of them.

    Raises:
        ConfigError: `count` is negative, or more than there are tasks times ways of asking.
    """
    tasks = read_lines("code_tasks.txt")
    check_count(count, len(tasks) * len(_REQUESTS) * len(_WISHES))
    rng = random.Random(seed)
    ways = {task: shuffled_forever(list(itertools.product(_REQUESTS, _WISHES)), rng) for task in tasks}

    def draw() -> str:
        task = next(order)
        request, wish = next(ways[task])
        return request.format(task) + wish

    order = shuffled_forever(tasks, rng)
    return distinct(draw, count, "code")


def _draw_slots(rng: random.Random) -> dict[str, object]:
    """Draw what a maths template may name: two people, words, and numbers of growing size.

    a, b, c in 2..9, m, n in 11..39, k in 41..99, h in 150..480: templates rely on that to never take away more than
    there is, and on the derived numbers for divisions without remainder.
    """
    person, other = rng.sample(PEOPLE, 2)
    a, b, c = rng.sample(range(2, 10), 3)
    m, n = rng.sample(range(11, 40), 2)
    k = rng.randrange(41, 100)
    h = rng.randrange(150, 490, 10)
    numbers = {"a": a, "b": b, "c": c, "m": m, "n": n, "k": k, "h": h, "percent": rng.randrange(5, 45, 5)}
    derived = {"ab": a * b, "bc": b * c, "am": a * m, "sum": 2 * m + a, "full_box": k + a * m, "rope": a * m + b}
    words = {slot: rng.choice(choices) for slot, choices in _WORDS.items()}
    return {
        **person._asdict(),
        "They": person.they.capitalize(),
        "other": other.name,
        **words,
        **numbers,
        **derived,
        "over": h + k,
    }
