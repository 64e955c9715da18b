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


@pytest.mark.parametrize("size", [2, 4] if LONG else [2])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_are_those_of_the_naive_form(model, size):
    for each in run_ranks(programs.beside_naive_all, size, args=([model], WAYS), timeout=600):
        assert len(each) == len(WAYS)
        assert {name: found for name, found in each.items() if isinstance(found, str) or found > 1e-10} == {}
