"""Messages that tell their length first, for engines that end the process which gets more than it expects (Gloo)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from wholestep.comm.dist_errors import DistMismatchError
from wholestep.comm.engines.work_queue import Lane
from wholestep.comm.work import All, Work

LENGTHS = 1 << 28  # added to a message's tag: that of its length
Carrier = Callable[[list[torch.Tensor], int, int], Any]  # tensors, the other rank, tag


class Letters:
    """Sends and receives of one group.

    Args:
        send, recv: of the engine.
        name: whose they are, for errors.
    """

    def __init__(self, send: Carrier, recv: Carrier, name: Callable[[], str]) -> None:
        self._send, self._recv, self.name = send, recv, name
        self._lanes: dict[tuple[int, int], Lane] = {}  # by sender and tag: their messages come in order

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        length = self._send([torch.tensor([tensor.nbytes])], dst, tag + LENGTHS)
        return All([length, self._send([tensor], dst, tag)], [tensor])

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """In a thread, since what comes may only be asked for when its length is known."""
        return Receipt(self, tensor, src, tag)

    def start(self, receipt: Receipt, src: int, tag: int) -> Work:
        lane = self._lanes.setdefault((src, tag), Lane())
        return lane.start("recv", receipt.take, receipt.result_tensors, True)

    def take(self, tensor: torch.Tensor, src: int, tag: int) -> int:
        """Receives a message and gives its sender.

        Raises:
            DistMismatchError: it has another length; it is gone then.
        """
        length = torch.zeros(1, dtype=torch.int64)
        told = self._recv([length], src, tag + LENGTHS)
        told.wait()
        sender, sent = int(told.source if src < 0 else src), int(length)
        fits = sent == tensor.nbytes
        self._recv([tensor if fits else torch.empty(sent, dtype=torch.uint8)], sender, tag).wait()
        if not fits:
            raise DistMismatchError(f"{self.name()}: recv: {tensor.nbytes} bytes are required, {sent} were sent")
        return sender

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


class Receipt(Work):
    """A message that is to come."""

    def __init__(self, letters: Letters, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._letters, self._where, self.source = letters, (src, tag), -1
        self.result_tensors = self._result = [tensor]
        self._inner = letters.start(self, src, tag)

    def take(self) -> None:
        self.source = self._letters.take(self.result_tensors[0], *self._where)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        try:
            return self._inner.wait(timeout)
        except BaseException as failure:
            self._failed(failure)
            raise

    def is_completed(self) -> bool:
        return self._inner.is_completed()
