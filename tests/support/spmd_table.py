"""The table of sharding rules: operator by operator, the ways in which one small call of it can run on parts.

    python -m tests.support.spmd_table > docs/spmd_rules.md
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.spmd_rules import Sample, call_of, shown
from tests.support.spmd_samples import collectives, random_samples, samples
from wholestep.spmd import rules
from wholestep.spmd.mesh import AxisGroup

HEAD = """# Sharding rules

Written by `python -m tests.support.spmd_table > docs/spmd_rules.md`; a test holds it true, and another runs every row
on two and three ranks against the whole call. Each way: placements of the operands → placements of the results. S0 is
a split of dimension 0, R the whole, P addends (max, min: of maxima, minima), O a workspace that only the rank's own
kernels can read; * means that other calls than the same one on local operands are written. The shapes are those of
one sample on two ranks: which dimensions can be split follows from the shapes and arguments of each call. Everything
whole is always possible.

Operators that torch tags as pointwise have the rule of `aten.exp` or, with several operands, `aten.addcmul`; of
operators on lists (`_foreach_…`, `_fused_…`) each column of the lists goes its own way, here the first. What has no
tensor among its operands is made whole on every rank, or in pieces where all readers want pieces. `functional(…)`
is the pure form of an operator that writes.
"""


# Operators that run whole on purpose, and why.
WHOLE: dict[str, str] = {
    "aten._local_scalar_dense": "the number that it reads is every rank's",
    "aten.as_strided": "its strides are those of the whole's memory",
    "aten.as_strided_scatter": "its strides are those of the whole's memory",
    "aten.poisson": "how many numbers it draws depends on values",
    "aten.binomial": "how many numbers it draws depends on values",
    "aten._standard_gamma": "how many numbers it draws depends on values",
    "aten.rrelu_with_noise_functional": "how many numbers it draws depends on values",
}


def lines() -> Iterator[str]:
    """The document."""
    yield HEAD
    yield "| operator | operands | ways |"
    yield "|---|---|---|"
    first: dict[str, Sample] = {}
    without_group = [one for one in collectives("") if "gather" not in str(one) and "scatter" not in str(one)]
    for sample in [*samples(), *random_samples(), *without_group]:
        first.setdefault(rules.name_of(sample.target), sample)
    by_rule = {id(rules.TABLE[name]): name for name in reversed(first) if name in rules.TABLE}
    for name in sorted({*rules.TABLE, *first}):
        if name in first:
            yield _line(name, first[name])
        else:
            known = by_rule.get(id(rules.TABLE[name]))
            yield f"| `{name}` | | as `{known}` |" if known else f"| `{name}` | | whole: nothing is read |"
    yield "\nWhole on purpose:\n"
    yield from (f"- `{name}`: {why}" for name, why in sorted(WHOLE.items()))


def _line(name: str, sample: Sample) -> str:
    call = call_of(sample, AxisGroup("", 2, 0))[1][0]
    operands = " ".join(str(list(value.shape)) for value in call.values)
    return f"| `{name}` | {operands} | {'; '.join(dict.fromkeys(map(shown, rules.strategies(call))))} |"


if __name__ == "__main__":
    print("\n".join(lines()))
