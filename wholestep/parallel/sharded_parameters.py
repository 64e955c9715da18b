"""Parameters of which each rank holds a part: gathered in one collective, their gradients reduced in another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from wholestep import comm
from wholestep.comm.ops.functional_collectives import piece, piece_size
from wholestep.deferred_init import become, part_values
from wholestep.parallel.buckets import memory_for
from wholestep.parallel.equal_models import noted
from wholestep.tensor_parts import Part, give_data, mark_part, part_of
from wholestep.torch_compat import plain_subclasses

ALONE_BYTES = 2**20  # a parameter from this size on is gathered by itself: right into its place, without a copy

_ELSEWHERE = (
    "fully_shard: this rank {}; others do not, if their step raised an error: have every rank run the same modules on "
    "equally many batches, and use all they give in its loss"
)


@dataclass(frozen=True)
class Policies:
    """What the buckets of a module are gathered and reduced with.

    Attributes:
        group: the ranks among which parameters are divided.
        replicas: ranks that hold the same parts, if there are any.
        param_dtype, reduce_dtype: of whole parameters and of gradients on their way; None for the parameter's.
        device: of whole parameters.
        home: of the parts.
        pinned: whether the parts are in memory from which a GPU reads by itself.
    """

    group: comm.ProcessGroup
    replicas: comm.ProcessGroup | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    device: torch.device
    home: torch.device
    pinned: bool = False

    def computes(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype in which a whole parameter is computed with."""
        cast = self.param_dtype if parameter.is_floating_point() else None
        return cast or parameter.dtype


class Sharded:
    """One parameter, whose data becomes this rank's part of it.

    Args:
        name: for messages.
        parameter: still whole.
        places: the modules that have it, and by which names.
        dim: the dimension that is divided, in pieces of one length but for the last ones, which may be empty.

    Attributes:
        chunk: elements of the longest part.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, places: list[tuple[nn.Module, str]], dim: int,
        group: comm.ProcessGroup,
    ) -> None:  # fmt: skip
        self.name, self.parameter, self.places, self.dim = name, parameter, places, dim
        self.shape = parameter.shape
        rows, rest = self.shape[dim], [*self.shape[:dim], *self.shape[dim + 1 :]]
        each = piece_size(rows, group.size())
        spans = [(0, size) for size in self.shape]
        spans[dim] = piece(rows, group.size(), group.rank())
        self.part = Part.of(self.shape, spans)
        self.chunk, self.even = each * math.prod(rest), rows % group.size() == 0
        strides = list(torch.empty(rows, *rest, device="meta").stride())
        self._strides = [*strides[1 : dim + 1], strides[0], *strides[dim + 1 :]]

    def whole_in(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole parameter, which lies at the front of a flat tensor, the divided dimension slowest."""
        return flat.as_strided(self.shape, self._strides)

    def part_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of it, of the same order."""
        return flat.as_strided(self.part.size, self._strides)


class ShardBucket:
    """Parameters of one dtype whose parts lie one after the other in a flat tensor.

    Attributes:
        number: among all of a root's.
        whole: the gathered parameters, as long as they are there.
        shown: what modules show of them.
        stamp: that of the parts that they were gathered from: how often they got other memory, and their versions.
        syncs: whether gradients are reduced, or kept.
        divisor: what their sum is divided by; None for their mean.
    """

    number = 0

    def __init__(self, members: list[Sharded], policies: Policies) -> None:
        self.members, self.policies = members, policies
        self.chunks = [one.chunk for one in members]
        self.parameters = [one.parameter for one in members]
        self.whole: list[torch.Tensor] | None = None
        self.shown: tuple[torch.Tensor, ...] = ()
        self.stamp: list[int] = []
        self.syncs = True
        self.divisor: float | None = None
        self.kept: list[torch.Tensor | None] = [None] * len(members)
        self._coming: tuple[comm.Work | None, torch.Tensor, torch.Tensor] | None = None
        self._laid_out = 0
        self._lay_out()

    @torch.no_grad()
    def _lay_out(self) -> None:
        """Makes the parameters' data views of one flat tensor."""
        self.drop()
        self._laid_out += 1
        dtypes = {one.dtype for one in self.parameters}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"fully_shard: {', '.join(one.name for one in self.members)} must have one dtype, found {dtypes}: "
                "convert the whole module"
            )
        self.flat = torch.zeros(  # not shared, which is no faster, and would count as the memory of all ranks
            sum(self.chunks), dtype=dtypes.pop(), device=self.policies.home, pin_memory=self.policies.pinned
        )
        for one, room in zip(self.members, self.flat.split(self.chunks), strict=True):
            parameter, data, grad = one.parameter, one.part_in(room), one.parameter.grad
            first = part_of(parameter) is None
            data.copy_(part_values(parameter, one.part) if first else parameter.detach())
            parameter.grad = None
            become(parameter, data)
            parameter.grad = grad.detach()[one.part.slices].clone() if first and grad is not None else grad
            mark_part(parameter, one.part)
        self._addresses = [one.data_ptr() for one in self.parameters]

    def _checked(self) -> torch.Tensor:
        """The flat tensor, with what has become of the parameters since.

        Raises:
            RuntimeError: a module has another parameter in the place of one.
        """
        for one in self.members:
            for owner, name in one.places:
                if owner._parameters.get(name) is not one.parameter:
                    raise RuntimeError(
                        f"fully_shard: {one.name} has been exchanged for another tensor (by load_state_dict(assign="
                        "True), functional_call or an assignment): change the values of the one that is there"
                    )
        if [one.data_ptr() for one in self.parameters] != self._addresses:  # by module.to(...), say
            self._lay_out()
        return self.flat

    def stamp_now(self) -> list[int]:
        """The parts' stamp."""
        return [self._laid_out, *(one._version for one in self.parameters)]

    # Gathering

    @torch.inference_mode(False)  # else what is gathered for an evaluation would serve that alone
    @torch.no_grad()
    def start(self, async_op: bool) -> bool:
        """Begins to gather, unless the parameters are there, or on their way, as the parts are now.

        Returns:
            Whether it began.
        """
        with plain_subclasses():  # a microsecond less for each parameter
            flat, stamp = self._checked(), self.stamp_now()
        if (self.whole is not None or self._coming is not None) and self.stamp == stamp:
            return False
        self.drop()
        policies, group = self.policies, self.policies.group
        source = flat.to(policies.device, policies.computes(flat))
        gathered = memory_for(group, group.size() * len(flat), source.dtype, policies.device)
        self.stamp = stamp
        with noted(_ELSEWHERE.format("gathers {}"), self.members):
            work = comm.all_gather_into_tensor(gathered, source, group, async_op)
        self._coming = work, gathered, source
        return True

    @torch.inference_mode(False)  # else what is gathered for an evaluation would serve that alone
    @torch.no_grad()
    def arrived(self) -> list[torch.Tensor]:
        """The whole parameters, after `start`."""
        if self.whole is None:
            gathered = self._await()
            assert gathered is not None
            self.whole = self._in_order(gathered)
            self._whole_versions = [one._version for one in self.whole]
        return self.whole

    def _await(self) -> torch.Tensor | None:
        """What is on its way, if something is, when it has come."""
        work, gathered, _ = self._coming or (None, None, None)
        self._coming = None
        if work is not None:
            work.wait()
        return gathered

    def _in_order(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter, of the parts of all ranks one after the other."""
        pieces = [gathered]
        if len(self.members) > 1:
            parts = gathered.view(self.policies.group.size(), -1)
            pieces = torch.ops.aten.split_with_sizes_copy(parts, self.chunks, 1)
        return [m.whole_in(piece) for m, piece in zip(self.members, pieces, strict=True)]

    @torch.no_grad()
    def give_whole(self) -> None:
        """Makes the parameters themselves whole, in their own dtype, until `take_back`."""
        flat = self._checked().to(self.policies.device)
        gathered = flat.new_empty(self.policies.group.size() * len(flat))
        comm.all_gather_into_tensor(gathered, flat, self.policies.group)
        self.drop()
        for parameter, whole in zip(self.parameters, self._in_order(gathered), strict=True):
            give_data(parameter, whole.to(self.policies.home))
            mark_part(parameter, None)

    @torch.no_grad()
    def take_back(self, writeback: bool) -> None:
        """Makes the parameters parts again: with what they have become, or as they were."""
        for one, room in zip(self.members, self.flat.split(self.chunks), strict=True):
            data = one.part_in(room)
            if writeback:
                data.copy_(one.parameter.detach()[one.part.slices])
            give_data(one.parameter, data)
            mark_part(one.parameter, one.part)

    def drop(self) -> None:
        """Lets go of the whole parameters.

        Raises:
            RuntimeError: they were written to.
        """
        whole, self.whole = self.whole, None
        shown, self.shown = self.shown or whole, ()
        self._await()
        if whole is None or shown is None:
            return
        changed = [
            one._version != version or one.data_ptr() != other.data_ptr()
            for one, version, other in zip(whole, self._whole_versions, shown, strict=True)
        ]
        if any(changed):
            names = ", ".join(m.name for m, one in zip(self.members, changed, strict=True) if one)
            raise RuntimeError(
                f"fully_shard: {names} changed in place while gathered, which would be lost: change the parts (outside "
                "of forward), or use summon_full_params"
            )

    # Reducing

    @torch.no_grad()
    def reduce(self, grads: list[torch.Tensor | None], async_op: bool) -> Reduction | None:
        """Begins to reduce gradients of the whole parameters, together with those that were kept before.

        Returns:
            What gives the parts' gradients; None where they are kept.
        """
        dtype, kept = self.policies.reduce_dtype, self.kept
        if dtype is not None:
            grads = [None if one is None else one.to(dtype) for one in grads]
        pairs = list(zip(grads, kept, strict=True))
        grads = [b if a is None else a if b is None else a + b for a, b in pairs]
        self.kept = [None] * len(grads) if self.syncs else grads
        return Reduction(self, grads, async_op) if self.syncs and any(one is not None for one in grads) else None

    @torch.no_grad()
    def accumulate(self, reduction: Reduction | None) -> None:
        """Gives the parts gradients that no backward gives them."""
        for parameter, part in zip(self.parameters, reduction.parts() if reduction else (), strict=False):
            if part is not None:
                parameter.grad = part if parameter.grad is None else parameter.grad + part


class Reduction:
    """The mean of gradients over the ranks, or their sum divided by a factor, of which each rank gets its parts."""

    def __init__(self, bucket: ShardBucket, grads: list[torch.Tensor | None], async_op: bool) -> None:
        self._bucket, policies, size = bucket, bucket.policies, bucket.policies.group.size()
        self.used = [one is not None for one in grads]
        self._members = [m for m, used in zip(bucket.members, self.used, strict=True) if used]
        pairs = zip(bucket.members, grads, strict=True)
        rows = [g.movedim(m.dim, 0) if m.dim else g for m, g in pairs if g is not None]
        if len(rows) == 1 and self._members[0].even:
            given = rows[0].reshape(size, -1)
        else:
            filled = [one for one in rows if one.numel()]  # the kernel refuses others
            given = torch.ops.aten._chunk_cat(filled, 0, size) if filled else rows[0].new_empty(size, 0)
        self._reduces = "avg"
        if bucket.divisor is not None:
            self._reduces, given = "sum", given / bucket.divisor  # now, or a sum in float16 may overflow
        self._result = memory_for(policies.group, given.shape[1], given.dtype, given.device)
        with noted(_ELSEWHERE.format("reduces gradients of {}"), self._members):
            self._work = comm.reduce_scatter_tensor(self._result, given, self._reduces, policies.group, async_op)
        self._given: torch.Tensor | None = given

    def wait(self) -> None:
        """Ends the reduction among the ranks that divide the parameters."""
        if self._work is not None:
            self._work.wait()
        self._work = self._given = None

    @torch.no_grad()
    def parts(self) -> list[torch.Tensor | None]:
        """The gradient of each part; None where there was none."""
        self.wait()
        policies = self._bucket.policies
        if policies.replicas is not None:
            comm.all_reduce(self._result, self._reduces, group=policies.replicas)
        result = self._result.to(policies.home, self._bucket.flat.dtype)
        pieces = iter(result.split([one.chunk for one in self._members]))
        return [
            m.part_in(next(pieces)) if used else None for m, used in zip(self._bucket.members, self.used, strict=True)
        ]
