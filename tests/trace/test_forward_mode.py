"""Forward-mode derivatives: tangents that are not there are eager's zeros without memory, in products and sums."""

import pytest
import torch
from torch.func import hessian, jvp, vmap

import wholestep as ws
from wholestep.errors import UnsupportedError

C = torch.tensor([2.0, -3.0, 0.5])
X, T = torch.tensor([float("inf"), -1.0, 2.0]), torch.tensor([1.0, -0.0, 2.0])

CASES = {
    "products": lambda x, t: jvp(lambda v: v * C, (x,), (t,)),  # nothing times infinity is nothing
    "quotients": lambda x, t: jvp(lambda v: v / C, (x,), (t,)),
    "sums": lambda x, t: jvp(lambda v: torch.sub(C, v, alpha=3) + torch.add(C.double(), v, alpha=0.5), (x,), (t,)),
    "cross": lambda x, t: jvp(lambda v: torch.linalg.cross(v, C), (x,), (t,)),
    "batched": lambda x, t: vmap(lambda a, b: jvp(lambda v: v * C[:1] - v.cos() / C[0], (a,), (b,)))(
        x[:, None], t[:, None]
    ),
    "nested": lambda x, t: jvp(lambda v: jvp(lambda u: u * C * u, (v,), (t,))[1], (x,), (t,)),  # becomes zeros there
    "nested, of one element": lambda x, t: jvp(
        lambda v: jvp(lambda u: u * C[0] * u, (v,), (t[0],))[1], (x[0],), (t[0],)
    ),
    "signs of zeros": lambda x, t: hessian(lambda v: (v**3).sum())(t - 2),
}


@pytest.mark.parametrize("case", CASES)
def test_derivatives_are_eagers(case: str) -> None:
    expected, found = CASES[case](X, T), ws.compile(CASES[case], fullgraph=True)(X, T)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    last = [result[-1] if isinstance(result, tuple) else result for result in (expected, found)]
    assert torch.equal(*map(torch.signbit, last))


def test_what_has_no_memory_and_what_reads_it_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="zeros without memory.*\n.*\n.*torch.zeros_like"):
        ws.compile(lambda x: x + 1, fullgraph=True)(torch._efficientzerotensor(3))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="torch.func.linearize computes with values.*\n.*\n.*torch.func.jvp"):
        ws.compile(lambda x: torch.func.linearize(lambda x: x.sin() * 2, x)[1](x), fullgraph=True)(X)
