"""Anchored holders: the code that reads their tensors and compares what they hold, by identity and in bulk.

A module's attributes or an optimizer's state are the same objects at each call: the code refers to them directly.
Identity is strict where equality is not, and costs 15 ns a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch

from wholestep.capture.guards.compared_values import is_plain
from wholestep.capture.guards.per_call_objects import Volatile
from wholestep.capture.snapshot import container_kinds as kinds
from wholestep.capture.snapshot.reachable import Container
from wholestep.capture.snapshot.snapshot import Snapshot
from wholestep.capture.sources import Attr, Source, contents, is_exact
from wholestep.torch_compat import HOOK_TABLES

_SHAPE, _CONTIGUOUS = attrgetter("shape"), torch.Tensor.is_contiguous
_GRAD_AND_HOOKS = attrgetter("grad", *HOOK_TABLES)
_KIND = attrgetter("layout", "requires_grad", "dtype")


class Anchors(Volatile):
    """A draft that compares anchored holders too.

    Attributes:
        tensors: those of anchored holders, which the code has in the list ``t``.
        watched: positions in it of those that want gradients.
        gradients: positions of the gradients that the program reads.
    """

    def __init__(self, snap: Snapshot, inputs: Sequence[Source]) -> None:
        super().__init__(snap)
        self.read = {source.path for source in inputs}
        self.tensors: list[torch.Tensor] = []
        self.watched: list[int] = []
        self.gradients: range = range(0)

    # their tensors -------------------------------------------------------------------------------------

    def _is_anchored(self, container: Container) -> bool:
        return id(container.owner) not in self.volatile and container.kind not in (kinds.TENSOR, kinds.TUPLE, kinds.FROZENSET)

    def _gather(self) -> None:
        """Reads every tensor of an anchored holder into the list ``t``: whole dicts first, then one by one."""
        whole: list[dict[Any, Any]] = []
        singles: list[str] = []
        tensors: list[torch.Tensor] = []
        for container in filter(self._is_anchored, self.snap.containers):
            values = list(container.before.values())
            if container.kind in (kinds.MAPPING, kinds.ATTRIBUTES) and values and not container.ignored and \
                    all(isinstance(v, torch.Tensor) and id(v) not in self.anchored_tensors for v in values) and \
                    len({id(v) for v in values}) == len(values):
                whole.append(container.value)
                for value in values:
                    self.anchored_tensors[id(value)] = f"t[{len(tensors)}]"
                    tensors.append(value)
        for container in filter(self._is_anchored, self.snap.containers):
            for key, value in container.before.items():
                if isinstance(value, torch.Tensor) and id(value) not in self.anchored_tensors \
                        and key not in container.ignored and container.kind is not kinds.SET:
                    self.anchored_tensors[id(value)] = f"t[{len(tensors)}]"
                    tensors.append(value)
                    singles.append(self._at(container, key))
        by_path = {id(v) for p in self.snap.containers if id(p.owner) in self.volatile
                   for k, v in p.before.items() if k not in p.ignored}
        by_path |= {id(value) for _, value in self.snap.reachable.roots}
        for found in self.snap.tensors.values():  # in tuples, sets and keys, whose identity is compared elsewhere
            if id(found.tensor) not in self.anchored_tensors and id(found.tensor) not in by_path \
                    and not (isinstance(found.source, Attr) and found.source.key == "grad"):
                self.anchored_tensors[id(found.tensor)] = f"t[{len(tensors)}]"
                tensors.append(found.tensor)
                singles.append(self._name(found.tensor))
        self.whole = {id(holder) for holder in whole}
        reads = [f"*chain(map(values, {self._fresh(whole)}))"] * bool(whole) + singles
        self.lines.append(f"t = [{', '.join(reads)}]")
        self._gradients(tensors)

    def _gradients(self, tensors: list[torch.Tensor]) -> None:
        """Checks ``.grad`` and hooks of anchored tensors that want gradients; grads join the list ``t``."""
        watched = [i for i, t in enumerate(tensors)
                   if t.is_leaf and (t.requires_grad or isinstance(t, torch.nn.Parameter))]
        if watched:
            expected = [_GRAD_AND_HOOKS(tensors[i]) for i in watched]
            pick = self._fresh(itemgetter(*watched) if len(watched) > 1 else lambda t, i=watched[0]: (t[i],))
            self.lines.append(f"g = list(map({self._fresh(_GRAD_AND_HOOKS)}, {pick}(t)))")
            free = [self.snap.replaces_gradient_of(tensors[i]) for i in watched]
            grads = [(j, e[0]) for j, e in enumerate(expected) if e[0] is not None and not free[j]]
            if any(free):
                kinds = [(f or e[0] is None, *e[1:]) for f, e in zip(free, expected, strict=True)]
                self._require(f"[(f or x is None, h, k) for f, (x, h, k) in zip({self._fresh(free)}, g)] == "
                              f"{self._fresh(kinds)}")
            elif not grads:
                self._require(f"g == {self._fresh(expected)}")
            else:
                self._require(f"[(x is None, h, k) for x, h, k in g] == "
                              f"{self._fresh([(e[0] is None, *e[1:]) for e in expected])}")
            if grads:
                self._present(grads, tensors)
        self.tensors = tensors
        self.watched = watched
        state = {id(f.tensor) for f in self.snap.tensors.values() if f.kind in ("state", "grad")}
        checked = [i for i, t in enumerate(tensors) if id(t) not in state]
        if self.gradients:
            self.lines.append("recall()")
        self.lines.append("if not identical(t, LAST) and not rebind(t): return None")
        if not checked:
            return
        pick = self._fresh(itemgetter(*checked) if len(checked) > 1 else lambda t, i=checked[0]: (t[i],))
        self.lines.append(f"p = {pick}(t)")
        for getter in (_SHAPE, _CONTIGUOUS, attrgetter("requires_grad")):
            expected_list = [getter(tensors[i]) for i in checked]
            self._require(f"list(map({self._fresh(getter)}, p)) == {self._fresh(expected_list)}")

    def _present(self, grads: list[tuple[int, torch.Tensor]], tensors: list[torch.Tensor]) -> None:
        """Gradients that are there: those that the program reads join ``t``, others may be let go while it runs."""
        fresh = [(j, grad) for j, grad in grads if id(grad) not in self.anchored_tensors]
        read = [(j, grad) for j, grad in fresh if self.snap.tensors[id(grad)].source.path in self.read]
        unread = [(j, grad) for j, grad in fresh if (j, grad) not in read]
        if unread:
            kinds = [_KIND(grad) for _, grad in unread]
            self._require(f"[kind(g[j][0]) for j in {[j for j, _ in unread]}] == {self._fresh(kinds)}")
            self.space["kind"] = _KIND
        if read:
            self.lines.append(f"t += [{', '.join(f'g[{j}][0]' for j, _ in read)}]")
        self.gradients = range(len(tensors), len(tensors) + len(read))
        for _, grad in read:
            self.anchored_tensors[id(grad)] = f"t[{len(tensors)}]"
            tensors.append(grad)

    # what they hold ------------------------------------------------------------------------------------

    def _anchored(self) -> None:
        """Compares anchored holders: their keys, then their values, as long lists; odd ones by themselves."""
        empty: list[Any] = []
        dicts: list[Any] = []  # keys of these are compared
        sizes: list[Any] = []  # the number of keys of these
        stable: list[Any] = []  # all values of these
        parts: list[tuple[Any, Any]] = []  # what a getter takes from these
        lists: list[Any] = []
        for container in filter(self._is_anchored, self.snap.containers):
            special = [k for k, v in container.before.items() if k not in container.ignored and self._special(v, container)]
            if not is_exact(container.value) and container.kind in (kinds.MAPPING, kinds.LIST):
                copied = f"{self._name(contents)}({self._name(container.value)})"
                expected = self._fresh([*container.before]) if container.kind is kinds.MAPPING else copied
                self._require(f"len({copied}) == {len(container.before)} and identical({copied}, {expected})")
                self._one_by_one(container, [key for key in container.before if key not in container.ignored])
            elif not container.before and container.kind in (kinds.MAPPING, kinds.ATTRIBUTES, kinds.SET, kinds.LIST):
                empty.append(container.value)
            elif container.kind in (kinds.MAPPING, kinds.ATTRIBUTES, kinds.MODULE):
                if container.kind is kinds.ATTRIBUTES:
                    sizes.append(container.value)  # and looked up by key: nothing follows from their order
                elif all(type(key) in (str, int) for key in container.before):
                    dicts.append(container.value)
                else:
                    holder, keys = self._name(container.value), list(container.before)
                    self._require(f"len({holder}) == {len(keys)} and identical({holder}, {self._fresh(keys)})")
                plain = [k for k in container.before if k not in container.ignored and k not in special]
                if len(plain) == len(container.before) and container.kind is not kinds.ATTRIBUTES:
                    stable.append(container.value)
                elif plain:
                    parts.append((itemgetter(*plain, plain[0]), container.value))
                if id(container.value) not in self.whole:
                    self._one_by_one(container, special)
            elif container.kind is kinds.LIST and not special and not container.ignored:
                lists.append(container.value)
            else:
                self._odd(container, special)
        if dicts:
            self._require(f"[*chain({self._fresh(dicts)})] == {self._fresh([k for d in dicts for k in d])}")
        if sizes:
            self._require(f"list(map(len, {self._fresh(sizes)})) == {self._fresh([len(d) for d in sizes])}")
        if stable:
            values = [v for d in stable for v in dict.values(d)]
            self._require(f"identical(chain(map(values, {self._fresh(stable)})), {self._fresh(values)})")
        if parts:
            getters, holders = [get for get, _ in parts], [holder for _, holder in parts]
            taken = [v for get, holder in parts for v in get(holder)]
            self._require(f"identical(chain(map(call, {self._fresh(getters)}, {self._fresh(holders)})), "
                          f"{self._fresh(taken)})")
        if lists:
            self._require(f"list(map(len, {self._fresh(lists)})) == {self._fresh([len(x) for x in lists])} and "
                          f"identical(chain({self._fresh(lists)}), {self._fresh([v for x in lists for v in x])})")
        if empty:
            self._require(f"not any({self._fresh(empty)})")

    def _special(self, value: Any, container: Container) -> bool:
        """True for a value that is not compared by identity with the last one: it has a path of its own."""
        if isinstance(value, torch.Tensor):
            return container.kind is not kinds.LIST or self._reads(value, container)
        return id(value) in self.volatile

    def _reads(self, tensor: torch.Tensor, container: Container) -> bool:
        """True when a list is where an anchored tensor is read from, not another way to reach it."""
        return self.snap.tensors[id(tensor)].source.path.startswith(container.source.path)

    def _one_by_one(self, container: Container, keys: Sequence[Any]) -> None:
        """Compares single values of an anchored holder."""
        for key in keys:
            value, expression = container.before[key], self._at(container, key)
            if isinstance(value, torch.Tensor):
                self._require(f"{expression} is {self.anchored_tensors[id(value)]}")
            elif id(value) in self.volatile:
                self._value(expression, value)
            else:
                self._require(f"{expression} is {self._name(value) if not is_plain(value) else self._fresh(value)}")

    def _odd(self, container: Container, special: Sequence[Any]) -> None:
        """Compares a holder that is neither a dict nor a plain list."""
        holder = self._name(container.value)
        if container.kind in (kinds.SET, kinds.DEQUE, kinds.LIST):
            self._require(f"len({holder}) == {len(container.before)}")
        if container.kind is kinds.SET or (container.kind is kinds.DEQUE and not special):
            self._require(f"identical({holder}, {self._fresh(list(container.value))})")
            return
        self._one_by_one(container, [key for key in container.before if key not in container.ignored])
        if container.kind is kinds.GLOBALS:
            absent = [name for name in container.value.names if name not in container.before]
            if absent:
                table = self._name(container.value.table)
                self._require(f"{table}.keys().isdisjoint({self._fresh(absent)})")
