# SPDX-License-Identifier: Apache-2.0
"""Simulated against measured speedups, and how much of the difference is time, how much behaviour."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from served_steps import ArmSteps, ServedStep
from step_costs import StepSeconds, priced, taken
from turns import Round, Row, Slice, summarize

from adaflash.speculative.cost_model import CostModel

LIMIT = 0.1


@dataclass(frozen=True)
class Cell:
    """An arm at one concurrency, in the rounds that the costs have not seen.

    Attributes:
        measured: As served.
        simulated: The same turns in the simulation.
        priced_speedup: Against `off`, of the served steps at the simulation's costs.
        taken: Seconds of the served steps.
        priced: The same at the simulation's costs.
        believing: Whether the simulated policy decided by the costs that the served one had; that does not count.
    """

    measured: Row
    simulated: Row
    priced_speedup: float
    taken: StepSeconds
    priced: StepSeconds
    believing: bool = False

    @property
    def error(self) -> float:
        """Simulated over measured speedup, less 1: (1 + time_error) * (1 + behaviour_error) - 1."""
        return speedup(self.simulated) / speedup(self.measured) - 1

    @property
    def time_error(self) -> float:
        """The part of it that is there for the very steps that were served."""
        return self.priced_speedup / speedup(self.measured) - 1

    @property
    def behaviour_error(self) -> float:
        """The part of it that comes from other steps than were served."""
        return speedup(self.simulated) / self.priced_speedup - 1

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        errors = {"error": self.error, "time_error": self.time_error, "behaviour_error": self.behaviour_error}
        rows = {name: asdict(row) for name, row in (("measured", self.measured), ("simulated", self.simulated))}
        seconds = {"taken": self.taken._asdict(), "priced": self.priced._asdict()}
        return {"believing": self.believing, **rows, "priced_speedup": self.priced_speedup, **seconds, **errors}


def speedup(row: Row) -> float:
    """Return tokens/s against `off`."""
    assert row.to_off is not None, "off is measured"
    return row.to_off.value


def compare(
    concurrency: int,
    measured: Sequence[Round],
    simulated: Mapping[str, Sequence[Slice]],
    steps: Mapping[str, ArmSteps],
    models: Mapping[str, CostModel],
    seed: int,
) -> list[Cell]:
    """Return a cell per arm of the odd rounds, in the order of `steps`.

    Args:
        concurrency: Users.
        measured: At least two rounds, with the arm `off`.
        simulated: As many turns of every arm.
        steps: Served, by arm; a turn each per round.
        models: Costs of every arm's simulation.
        seed: Of intervals.
    """
    names = list(steps)
    odd = {arm: [step for turn in one.turns[1::2] for step in turn] for arm, one in steps.items()}
    prices = {arm: priced(odd[arm], models[arm]) for arm in names}
    rates = {arm: _num_tokens(odd[arm]) / prices[arm].total for arm in names}
    rows = summarize(names, measured[1::2], concurrency, "odd rounds", seed)
    turns = [Round(turn.phase, {arm: simulated[arm][i] for arm in names}) for i, turn in enumerate(measured)]
    others = summarize(names, turns[1::2], concurrency, "odd rounds", seed)
    return [
        Cell(row, other, rates[row.arm] / rates["off"], taken(odd[row.arm]), prices[row.arm])
        for row, other in zip(rows, others, strict=True)
    ]


def show(cells: Sequence[Cell]) -> None:
    """Print the cells of one concurrency."""
    first = cells[0].measured
    print(f"\nconcurrency {first.concurrency}, speedups in {first.num_rounds} odd rounds; in brackets 95 % intervals")
    names = ("sim.", "error", "time", "behav.", "length", "sim.", "ver/tok", "sim.", "drafts", "sim.")
    print(f"{'arm':13s}{'measured':>18s}" + "".join(f"{name:>8s}" for name in names))
    for cell in cells:
        print(line(cell))
    if any(cell.believing for cell in cells):
        print("* deciding by the costs that the served policy believed in the end")
    sys.stdout.flush()


def line(cell: Cell) -> str:
    """Return a row of the table."""
    row, other, ratio = cell.measured, cell.simulated, cell.measured.to_off
    assert ratio is not None, "off is measured"
    errors = f"{cell.error:+8.1%}{cell.time_error:+8.1%}{cell.behaviour_error:+8.1%}"
    lengths = f"{row.acceptance_length:8.2f}{other.acceptance_length:8.2f}"
    verified = f"{row.verified_per_token:8.2f}{other.verified_per_token:8.2f}"
    drafting = f"{row.drafting_share:8.0%}{other.drafting_share:8.0%}"
    interval = f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
    return (
        f"{row.arm + '*' * cell.believing:13s}{interval:>18s}{speedup(other):8.2f}{errors}{lengths}{verified}{drafting}"
    )


def verdict(cells: Sequence[Cell]) -> str:
    """Return how many speedups are close; `off` is no speedup, and a policy that is told beliefs is no prediction."""
    compared = [cell for cell in cells if cell.measured.arm != "off" and not cell.believing]
    if not compared:
        return "nothing but off was measured"
    close = sum(abs(cell.error) <= LIMIT for cell in compared)
    worst = max(compared, key=lambda cell: abs(cell.error))
    where = f"{worst.measured.arm} at {worst.measured.concurrency}"
    return f"{close} of {len(compared)} speedups within {LIMIT:.0%}; largest error {worst.error:+.1%}, {where}"


def _num_tokens(steps: Sequence[ServedStep]) -> int:
    return sum(step.num_emitted for step in steps)
