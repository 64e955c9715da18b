"""Methods of torch's random generators, which never reach the dispatcher: nodes of the graph while a step is traced.

`torch.get_rng_state`, `torch.manual_seed`, `torch.random.fork_rng` and what libraries make of them end in these. Others
are refused (`external_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from wholestep import functional
from wholestep.errors import CaptureError
from wholestep.patches import Replacement
from wholestep.torch_compat import no_modes
from wholestep.trace.record.recorder import Recorder

Generator = torch.Generator

_get_state, _set_state, _manual_seed = Generator.get_state, Generator.set_state, Generator.manual_seed


def methods(recorder: Recorder) -> list[Replacement]:
    """What stands in for the methods of generators while the step is traced."""
    builder, refused = recorder.builder, recorder.numbers.refused

    def operand(generator: Generator) -> tuple[fx.Node, ...]:
        try:
            node = recorder.inputs.generator(generator)
        except CaptureError as error:
            raise refused(error) from None
        return () if node is None else (node,)

    def get_state(generator: Generator) -> torch.Tensor:
        with no_modes(), builder.fake_mode:
            fake = torch.empty(_get_state(generator).numel(), dtype=torch.uint8)
            value = builder.detached(fake)
            builder.root(fake, builder.emit(functional.get_rng_state, operand(generator), value=value))
        return fake

    def set_state(generator: Generator, new_state: torch.Tensor) -> Generator:
        with no_modes():
            if not isinstance(new_state, torch.Tensor):
                _set_state(generator, new_state)  # eager's error
            scratch = Generator(generator.device)
            if new_state.dtype != torch.uint8 or new_state.numel() != _get_state(scratch).numel():
                _set_state(scratch, torch.zeros(tuple(new_state.shape), dtype=new_state.dtype))  # eager's error
            read = recorder.inputs.read(new_state)
            builder.emit(functional.set_rng_state, (read, *operand(generator)), value=())
        return generator

    def manual_seed(generator: Generator, seed: int) -> Generator:
        seed = int(seed) if isinstance(seed, torch.SymInt) else seed
        _manual_seed(Generator(generator.device), seed)  # eager's errors
        builder.emit(functional.manual_seed, (seed, *operand(generator)), value=())
        return generator

    recorded: list[Callable[..., Any]] = [get_state, set_state, manual_seed]
    return [(Generator, method.__name__, method) for method in recorded]
