"""Models of transformers and others under each wrapper and mixture: losses and weights of the naive form, in float64.

WHOLESTEP_TEST_LONG=1 (`make test-parallel`) takes all of them, on two and four ranks.
"""

import os

import pytest

import tests.support.wrapped_models as programs
from wholestep.testing import run_ranks

LONG = bool(os.environ.get("WHOLESTEP_TEST_LONG"))
MODELS = programs.MODELS if LONG else ["mlp"]
WAYS = list(programs.WAYS) if LONG else ["join", "a hook, compiled step"]


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), *([("shm", 4), ("thread", 2)] if LONG else [])])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_are_those_of_the_naive_form(model, transport, size):
    for each in run_ranks(programs.beside_naive_all, size, transport, ([model], WAYS), timeout=600):
        assert len(each) == len(WAYS)
        assert {name: found for name, found in each.items() if isinstance(found, str) or found > 1e-10} == {}
