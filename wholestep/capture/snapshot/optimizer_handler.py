"""How an optimizer is walked."""

from __future__ import annotations

import torch

from wholestep.capture.snapshot import boxes
from wholestep.capture.snapshot.names_read import is_user_class
from wholestep.capture.snapshot.places import Number, Places
from wholestep.capture.sources import Attr, Item, Source, Vars

# What schedulers put into parameter groups, for themselves alone: a step that is given one later is no other step.
SCHEDULED = frozenset({"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"})
BOOKKEEPING = frozenset({
    "_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name",
    "_need_device_dtype_check_for_fused",
})


def optimizer(walk: Places, found: torch.optim.Optimizer, source: Source) -> None:
    """Walks an optimizer: the numbers among its settings are inputs of the step."""
    walk.holders.add(source.path)
    for index, group in enumerate(found.param_groups):
        where = Item(Item(Item(Vars(source), "param_groups"), index), "")
        later = frozenset(key for key in group if key in SCHEDULED and key not in found.defaults)
        lifted = set()
        for key, value in group.items():
            if isinstance(value, float) or (key == "lr" and type(value) is int):
                walk.numbers.append(Number(Item(where.base, key), float(value), group, key))
                lifted.add(key)
            elif type(value) is tuple and value and all(isinstance(v, float) for v in value):
                lifted.add(key)
                walk.numbers += [Number(Item(Item(where.base, key), i), v, group, key, i) for i, v in enumerate(value)]
        walk.first[id(group)] = where.base
        place = walk.add(group, where.base, boxes.MAPPING, None, later | lifted)
        place.lifted, place.ordered = frozenset(lifted - later), False
    walk.add(vars(found), Vars(source), boxes.ATTRIBUTES, found, BOOKKEEPING)
    if isinstance(found, torch.optim.SparseAdam):  # the one that counts steps in ints
        walk.counting |= set(map(id, found.state.values()))
    for base in type(found).__mro__:
        if is_user_class(base):
            walk.queue(base, Attr(source, "__class__"))
