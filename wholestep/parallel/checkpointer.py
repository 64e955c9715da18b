"""`Checkpointer`: a training loop that goes on from its last complete checkpoint, whatever ended it."""

from __future__ import annotations

import random
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholestep import comm
from wholestep.checkpoint.directory import read_index
from wholestep.checkpoint.load import load
from wholestep.checkpoint.save import save
from wholestep.checkpoint.saving_ranks import Ranks
from wholestep.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)")


class Checkpointer:
    """Saves a run every so many steps, keeps the last few checkpoints, and goes on from the last complete one.

        checkpoints = Checkpointer("runs/a", model, optimizer, every=100, scheduler=scheduler)
        for step in range(checkpoints.resume(), steps):  # the step is the position in the data
            ...
            checkpoints.step(step + 1)

    Kept are the model, the optimizer, the random generators of torch, Python and NumPy on each rank, and the state of
    whatever else is given. SIGTERM, as clusters send it before they end a job, has all ranks save after the step under
    way and exit with status 143. Collective: every rank makes one and calls it alike.

    Args:
        path: a directory of the run's own; ``step-N`` in it is what `wholestep.load` reads.
        model, optimizer: as for `wholestep.save`.
        every: steps between checkpoints; 0 for none but those that SIGTERM asks for and `save` makes.
        keep: how many checkpoints stay.
        stateful: what else has ``state_dict`` and ``load_state_dict``: schedulers, samplers, scalers. Rank 0's counts.

    Raises:
        ValueError: ``every`` or ``keep`` make no sense.
        TypeError: something in ``stateful`` has no state.
    """

    def __init__(
        self, path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
        every: int = 1000, keep: int = 2, **stateful: Any,
    ) -> None:  # fmt: skip
        if every < 0 or keep < 1:
            raise ValueError(f"Checkpointer: every >= 0 and keep >= 1 are required, found {every} and {keep}")
        for name, one in stateful.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(f"Checkpointer: {name} has no state_dict and load_state_dict: {type(one).__name__}")
        self.path, self.model, self.optimizer, self.stateful = Path(path), model, optimizer, stateful
        self.every, self.keep = every, keep
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def resume(self) -> int:
        """Loads the last complete checkpoint, if there is one.

        Returns:
            The number of steps that were done when it was saved; 0 without one.

        Raises:
            CheckpointError: on every rank: it is of another model.
        """
        ranks = Ranks()
        number = ranks.gather(max(self._complete(), default=0))[0]
        if number:
            extra = load(self.path / f"step-{number}", self.model, self.optimizer)
            for name, state in extra["stateful"].items():
                if name in self.stateful:
                    self.stateful[name].load_state_dict(state)
            _set_random(extra["random"][ranks.rank % len(extra["random"])])
        return number

    def step(self, number: int) -> None:
        """After a step: saves when it is time, or when a rank was sent SIGTERM, and exits then.

        Args:
            number: of steps that are done.

        Raises:
            SystemExit: with status 143, after SIGTERM.
        """
        on_gpu = comm.is_initialized() and comm.get_backend() == "nccl"
        asked = torch.tensor([self._asked], dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
        if comm.is_initialized():
            comm.all_reduce(asked, comm.ReduceOp.MAX)
        if asked or (self.every and number % self.every == 0):
            self.save(number)
        if asked:
            sys.exit(128 + signal.SIGTERM)

    def save(self, number: int) -> None:
        """Saves now, after so many steps, and removes what is older than the last few."""
        states = {name: one.state_dict() for name, one in self.stateful.items()}
        extra = {"stateful": states, "random": Ranks().gather(_random())}
        save(self.path / f"step-{number}", self.model, self.optimizer, extra)
        for old in sorted(self._complete())[: -self.keep]:
            shutil.rmtree(self.path / f"step-{old}")

    def _complete(self) -> list[int]:
        """The steps of complete checkpoints; on the first rank alone, whose answer counts."""
        found = []
        for entry in self.path.glob("step-*") if Ranks().rank == 0 else ():
            match = _STEP.fullmatch(entry.name)
            try:
                read_index(entry)
            except CheckpointError:  # a save that was interrupted
                continue
            found += [int(match[1])] if match else []
        return found


def _random() -> dict[str, Any]:
    """The states of the random generators, as plain data."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (name, torch.from_numpy(words.astype("int64")), *rest)
    return found


def _set_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, words, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, words.numpy().astype("uint32"), *rest))
