"""The shared-memory transport: ranks that are processes of one host, over the compiled engine in `native/`."""

from __future__ import annotations

import math
import struct
from itertools import accumulate
from typing import Any

import torch

from wholestep.comm.engines.native_codes import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    DTYPES,
    GATHER,
    MEAN,
    NUMBERS,
    OPS,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCTIONS,
    SCATTER,
    SEND,
    UNKNOWN,
    shape_code,
)
from wholestep.comm.engines.native_jobs import JobGroup, MessageWork
from wholestep.comm.process_group import Options
from wholestep.comm.reduce_op import RedOpType
from wholestep.comm.shared_tensors import native
from wholestep.comm.work import All, Work


def _addresses(tensors: list[torch.Tensor]) -> bytes:
    return struct.pack(f"{len(tensors)}Q", *(tensor.data_ptr() for tensor in tensors))


def _is_share(factor: float | torch.Tensor, ranks: int) -> bool:
    return isinstance(factor, float) and factor == 1 / ranks


def _sizes(tensors: list[torch.Tensor]) -> bytes:
    return struct.pack(f"{len(tensors)}Q", *(tensor.nbytes for tensor in tensors))


class ShmGroup(JobGroup):
    """The collectives of a group whose ranks are processes of one host and one user."""

    backend_name = "shm"

    def _reducing(self, tensor: torch.Tensor, opts: Options | None, what: str) -> tuple[torch.Tensor, int]:
        """The tensor as a dtype that the engine reduces, multiplied for PREMUL_SUM, and the code of the reduction."""
        kind = opts.op if opts else RedOpType.SUM
        if DTYPES.get(tensor.dtype, UNKNOWN) >= len(NUMBERS):
            raise TypeError(f"{what}: {tensor.dtype} cannot be reduced: one of {', '.join(NUMBERS)} is required")
        if kind is RedOpType.PREMUL_SUM and opts is not None and opts.factor is not None:
            if tensor.dtype in (torch.float32, torch.float64) and _is_share(opts.factor, self._size):
                return tensor, MEAN
            tensor = tensor * opts.factor
        return tensor, REDUCTIONS[kind]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        works = [self._all_reduce(tensor, opts) for tensor in tensors]
        return works[0] if len(works) == 1 else All(works, tensors)

    def _all_reduce(self, tensor: torch.Tensor, opts: Options | None) -> Work:
        source, red = self._reducing(tensor, opts, "all_reduce")
        at = tensor.data_ptr()
        return self._start(
            ALL_REDUCE, source, opts, [tensor], (source, tensor), nbytes=tensor.nbytes, shape=shape_code(tensor.shape),
            src=at if source.data_ptr() == at else source.data_ptr(), dst=at, red=red,
        )  # fmt: skip

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        source, red = self._reducing(tensor, opts, "reduce")
        return self._start(
            REDUCE, source, opts, tensors, (source, tensor), nbytes=tensor.nbytes, shape=shape_code(tensor.shape),
            src=source.data_ptr(), dst=tensor.data_ptr(), red=red,
        )  # fmt: skip

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = tensors
        at = tensor.data_ptr()
        return self._start(
            BROADCAST, tensor, opts, tensors, tensor,
            nbytes=tensor.nbytes, shape=shape_code(tensor.shape), src=at, dst=at,
        )  # fmt: skip

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,), (outs,) = inputs, outputs
        return self._start(
            ALL_GATHER, tensor, opts, outs, (tensor, outs), nbytes=tensor.nbytes, shape=shape_code(tensor.shape),
            src=tensor.data_ptr(), outs=_addresses(outs),
        )  # fmt: skip

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._start(
            ALL_GATHER, input, opts, [output], (input, output), nbytes=input.nbytes, shape=shape_code(input.shape),
            src=input.data_ptr(), dst=output.data_ptr(), out_stride=input.nbytes,
        )  # fmt: skip

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        (output,), (parts,) = outputs, inputs
        ready = [self._reducing(part, opts, "reduce_scatter") for part in parts]
        sources, red = [source for source, _ in ready], ready[0][1]
        return self._start(
            REDUCE_SCATTER, sources[0], opts, outputs, (sources, output), nbytes=output.nbytes,
            shape=shape_code(output.shape), dst=output.data_ptr(), ins=_addresses(sources), red=red,
        )  # fmt: skip

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        source, red = self._reducing(input, opts, "reduce_scatter_tensor")
        return self._start(
            REDUCE_SCATTER, source, opts, [output], (source, output), nbytes=output.nbytes, red=red,
            shape=shape_code(output.shape), src=source.data_ptr(), in_stride=output.nbytes, dst=output.data_ptr(),
        )  # fmt: skip

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        (tensor,) = inputs
        outs = outputs[0] if outputs else []
        return self._start(
            GATHER, tensor, opts, outs, (tensor, outs), nbytes=tensor.nbytes, shape=shape_code(tensor.shape),
            src=tensor.data_ptr(), outs=_addresses(outs) if outs else None,
        )  # fmt: skip

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        (output,) = outputs
        parts = inputs[0] if inputs else []
        return self._start(
            SCATTER, output, opts, outputs, (parts, output), nbytes=output.nbytes, shape=shape_code(output.shape),
            dst=output.data_ptr(), ins=_addresses(parts) if parts else None,
        )  # fmt: skip

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        return self._start(
            ALL_TO_ALL, inputs[0], opts, outputs, (outputs, inputs), ins=_addresses(inputs), outs=_addresses(outputs),
            in_sizes=_sizes(inputs), out_sizes=_sizes(outputs), out_stride=outputs[0].nbytes,
        )  # fmt: skip

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        row = math.prod(input.shape[1:]) * input.element_size()
        if opts is None or not (opts.in_splits or opts.out_splits):
            part = input.nbytes // self._size
            sizes = struct.pack(f"{self._size}Q", *[part] * self._size)
            return self._start(
                ALL_TO_ALL, input, opts, [output], (output, input), shape=shape_code(input.shape[1:]),
                src=input.data_ptr(), dst=output.data_ptr(), in_stride=part, out_stride=part, in_sizes=sizes,
                out_sizes=struct.pack(f"{self._size}Q", *[output.nbytes // self._size] * self._size),
            )  # fmt: skip
        ins = self._rows(input.shape[0], opts.in_splits if opts else [], row)
        outs = self._rows(output.shape[0], opts.out_splits if opts else [], row)
        starts = [list(accumulate(sizes, initial=at.data_ptr()))[:-1] for sizes, at in ((ins, input), (outs, output))]
        n = f"{self._size}Q"
        return self._start(
            ALL_TO_ALL, input, opts, [output], (output, input), shape=shape_code(input.shape[1:]),
            ins=struct.pack(n, *starts[0]), outs=struct.pack(n, *starts[1]),
            in_sizes=struct.pack(n, *ins), out_sizes=struct.pack(n, *outs),
        )  # fmt: skip

    def _rows(self, rows: int, splits: list[int], row: int) -> list[int]:
        return [split * row for split in splits or [rows // self._size] * self._size]

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        return self._message(SEND, tensors[0], dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        """``src`` -1 takes a message from any rank; the work's ``source`` tells which."""
        return self._message(RECV, tensors[0], src, tag)

    def _message(self, op: int, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        at, nbytes = tensor.data_ptr(), tensor.nbytes
        ticket = native.p2p_start(self._live(OPS[op]), op == SEND, peer, tag, at, nbytes)
        self.latest = (op, DTYPES.get(tensor.dtype, UNKNOWN), 0, peer, nbytes, 0, 0, 0, tensor.element_size())
        return MessageWork(self, ticket, op, peer, tensor)

    def barrier(self, opts: Any = None) -> Work:
        return self._start(BARRIER, None, opts, [])
