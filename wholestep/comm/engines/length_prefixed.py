"""Length-prefixed messages, for engines that abort the process on a size mismatch (Gloo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep.comm.engines.work_queue import WorkQueue
from wholestep.comm.work import All, Work
from wholestep.errors import DistMismatchError

LENGTHS = 1 << 28  # added to a message's tag: that of its length
Transfer = Callable[[list[torch.Tensor], int, int], Any]  # tensors, the other rank, tag


class LengthPrefixed:
    """Sends and receives of one group.

    Args:
        send, recv: of the engine.
        name: whose they are, for errors.
    """

    def __init__(self, send: Transfer, recv: Transfer, name: Callable[[], str]) -> None:
        self._send, self._recv, self.name = send, recv, name
        self._queues: dict[tuple[int, int], WorkQueue] = {}  # by sender and tag: their messages come in order

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        length = self._send([torch.tensor([tensor.nbytes])], dst, tag + LENGTHS)
        return All([length, self._send([tensor], dst, tag)], [tensor])

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """In a thread, since what comes may only be asked for when its length is known."""
        queue = self._queues.setdefault((src, tag), WorkQueue())
        return queue.start("recv", lambda: self._take(tensor, src, tag), [tensor], True)

    def _take(self, tensor: torch.Tensor, src: int, tag: int) -> int:
        """Receives a message and gives its sender.

        Raises:
            DistMismatchError: it has another length; it is gone then.
        """
        length = torch.zeros(1, dtype=torch.int64)
        length_work = self._recv([length], src, tag + LENGTHS)
        length_work.wait()
        sender, sent = int(length_work.source if src < 0 else src), int(length)
        fits = sent == tensor.nbytes
        self._recv([tensor if fits else torch.empty(sent, dtype=torch.uint8)], sender, tag).wait()
        if not fits:
            raise DistMismatchError(f"{self.name()}: recv: {tensor.nbytes} bytes are required, {sent} were sent")
        return sender

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
