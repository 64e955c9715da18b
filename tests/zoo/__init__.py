"""The zoo: small worlds (see `equal.World`), each a training step with its model, optimizer and data.

Each file holds one family and a dict from name to ``make(seed)``. All are tiny: a step takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.equal import Make


def register(family: dict[str, Make]) -> Callable[[Make], Make]:
    """Decorator: adds a world to its family under the function's name."""

    def add(make: Make) -> Make:
        family[make.__name__] = make
        return make

    return add
