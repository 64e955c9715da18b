"""Generates the binder's fast path for one snapshot: a function that answers "all as it was" in microseconds.

Holders are *anchored* or *volatile*. An anchored holder (a module's attributes, an optimizer's state) is the same
object at each call: the generated code refers to it directly and compares what it holds by identity, in bulk.
Identity is strict where equality is not, and costs 15 ns a value. A volatile holder (a batch, a tuple of hidden
states) is a new object at each call: its path is followed and its contents are compared one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, call, itemgetter
from types import CodeType, FunctionType
from typing import Any

import torch

from wholestep.capture import boxes
from wholestep.capture.anchored import Anchored, identical, memory, same_plain, sharing_pattern
from wholestep.capture.arrays import as_stamped
from wholestep.capture.snapshot import Snapshot
from wholestep.capture.source import REGISTRIES, Grad, Source
from wholestep.capture.walk import Number, Place, global_state, is_plain
from wholestep.torch_compat import HOOK_TABLES

Fast = Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any] | None]
_SHAPE, _CONTIGUOUS = attrgetter("shape"), torch.Tensor.is_contiguous
_GRAD_AND_HOOKS = attrgetter("grad", *HOOK_TABLES)
_KIND = attrgetter("layout", "requires_grad", "dtype")
_ANCHORS = (torch.nn.Module, torch.optim.Optimizer)
_NAMED = (boxes.ATTRIBUTES, boxes.SLOTS, boxes.CELL, boxes.NAMES)
_CONTAINERS = (dict, list, tuple, deque)


class FastPath:
    """Builds the generated function for one snapshot.

    Attributes:
        code: its text.
        function: ``(args, kwargs) -> inputs``, or None when anything differs.
    """

    def __init__(self, snap: Snapshot, inputs: Sequence[Source], mutated: frozenset[str]) -> None:
        self.snap = snap
        self.read = {source.path for source in inputs}
        self.names: dict[int, str] = {}  # id of an object -> the name that stands for it in the code
        self.space: dict[str, Any] = {
            "identical": identical, "same": same_plain, "chain": chain.from_iterable, "values": dict.values,
            "call": call, "global_state": global_state, "STATE": snap.walk.state, "memory": memory,
        }
        self.places: dict[int, list[Place]] = {}
        for place in snap.places:
            self.places.setdefault(id(place.owner), []).append(place)
        self.lines: list[str] = []
        self.volatile: set[int] = set()
        self.volatile_tables: set[int] = set()
        self.volatile_tensors: list[tuple[str, torch.Tensor]] = []
        self.anchored_tensors: dict[int, str] = {}
        self._mark_volatile()
        self._gather()
        self._arguments()
        self._anchored()
        self._memory(mutated)
        self._inputs(inputs)
        body = "\n        ".join(self.lines)
        self.code = f"def bind(args, kwargs):\n    try:\n        {body}\n    except (KeyError, AttributeError, " \
                    "IndexError, TypeError, ValueError, RuntimeError):\n        return None\n"
        exec(compiled(self.code), self.space)
        self.function: Fast = self.space["bind"]

    def is_anchored(self, value: Any) -> bool:
        """True for an object or attribute table that stays the very same while the fast path lets calls pass."""
        return id(value) not in self.volatile and id(value) not in self.volatile_tables

    # names ----------------------------------------------------------------------------------------------

    def _name(self, value: Any, prefix: str = "c") -> str:
        """A name in the code for a constant."""
        if id(value) not in self.names:
            self.names[id(value)] = self._fresh(value, prefix)
        return self.names[id(value)]

    def _fresh(self, value: Any, prefix: str = "k") -> str:
        name = f"{prefix}{len(self.space)}"
        self.space[name] = value
        return name

    def _require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    # which holders are volatile ------------------------------------------------------------------------

    def _mark_volatile(self) -> None:
        for _, value in self.snap.walk.roots[:-1]:
            self._mark(value)
        for place in self.snap.places:
            if isinstance(place.owner, torch.optim.Optimizer) or place.box not in _NAMED:
                continue
            for key, value in place.before.items():
                if type(value) in _CONTAINERS and key not in REGISTRIES and self._holds_tensor(value, set()):
                    self._mark(value)

    def _mark(self, value: Any) -> None:
        if id(value) in self.volatile or isinstance(value, (*_ANCHORS, torch.Tensor)):
            return
        if isinstance(value, FunctionType):
            self._mark_function(value)
            return
        holders = [p for p in self.places.get(id(value), ()) if p.box not in (boxes.CELL, boxes.NAMES, boxes.CLASS)]
        if not holders or callable(value):
            return
        self.volatile.add(id(value))
        for place in holders:
            self.volatile_tables.add(id(place.holder))
            for inner in place.before.values():
                self._mark(inner)

    def _mark_function(self, function: FunctionType) -> None:
        """A function made anew for each call, such as a hook, is known by its code and by what its cells hold."""
        cells = function.__closure__ or ()
        if vars(function) or any(not boxes.CELL.read(cell) for cell in cells):
            return
        self.volatile |= {id(function), *map(id, cells)}
        for held in (function.__defaults__, function.__kwdefaults__, *(cell.cell_contents for cell in cells)):
            self._mark(held)

    def _holds_tensor(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if type(value) not in _CONTAINERS or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds_tensor(v, seen) for v in (value.values() if isinstance(value, dict) else value))

    # tensors of anchored holders -----------------------------------------------------------------------

    def _is_anchored(self, place: Place) -> bool:
        return id(place.owner) not in self.volatile and place.box not in (boxes.TENSOR, boxes.TUPLE, boxes.FROZENSET)

    def _gather(self) -> None:
        """Reads every tensor of an anchored holder into the list ``t``: whole dicts first, then one by one."""
        whole: list[dict[Any, Any]] = []
        singles: list[str] = []
        tensors: list[torch.Tensor] = []
        for place in filter(self._is_anchored, self.snap.places):
            values = list(place.before.values())
            if place.box in (boxes.MAPPING, boxes.ATTRIBUTES) and values and not place.ignored and \
                    all(isinstance(v, torch.Tensor) and id(v) not in self.anchored_tensors for v in values) and \
                    len({id(v) for v in values}) == len(values):
                whole.append(place.holder)
                for value in values:
                    self.anchored_tensors[id(value)] = f"t[{len(tensors)}]"
                    tensors.append(value)
        for place in filter(self._is_anchored, self.snap.places):
            for key, value in place.before.items():
                if isinstance(value, torch.Tensor) and id(value) not in self.anchored_tensors \
                        and key not in place.ignored and place.box is not boxes.SET:
                    self.anchored_tensors[id(value)] = f"t[{len(tensors)}]"
                    tensors.append(value)
                    singles.append(self._at(place, key))
        by_path = {id(v) for p in self.snap.places if id(p.owner) in self.volatile
                   for k, v in p.before.items() if k not in p.ignored}
        by_path |= {id(value) for _, value in self.snap.walk.roots}
        for found in self.snap.tensors.values():  # in tuples, sets and keys, whose identity is compared elsewhere
            if id(found.tensor) not in self.anchored_tensors and id(found.tensor) not in by_path \
                    and not isinstance(found.source, Grad):
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
            grads = [(j, e[0]) for j, e in enumerate(expected) if e[0] is not None]
            if not grads:
                self._require(f"g == {self._fresh(expected)}")
            else:
                self._require(f"[(x is None, h, k) for x, h, k in g] == "
                              f"{self._fresh([(e[0] is None, *e[1:]) for e in expected])}")
                self._present(grads, tensors)
        self.tensors = tensors
        self.watched = watched
        state = {id(f.tensor) for f in self.snap.tensors.values() if f.kind in ("state", "grad")}
        checked = [i for i, t in enumerate(tensors) if id(t) not in state]
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
        for _, grad in read:
            self.anchored_tensors[id(grad)] = f"t[{len(tensors)}]"
            tensors.append(grad)

    def _at(self, place: Place, key: Any) -> str:
        """An expression for what an anchored or volatile holder has at a key."""
        holder = self._name(place.holder)
        if place.box is boxes.CELL:
            return f"{holder}.cell_contents"
        if place.box is boxes.NAMES:
            return f"{self._name(place.holder.function.__globals__)}[{key!r}]"
        if place.box is boxes.SLOTS:
            return f"{holder}.{key}"
        if place.box is boxes.CLASS:
            return f"{holder}.__dict__[{key!r}]"
        return f"{holder}[{key if type(key) is int else repr(key) if type(key) is str else self._name(key)}]"

    # arguments and other volatile holders --------------------------------------------------------------

    def _arguments(self) -> None:
        call = self.snap.call
        self._require(f"len(args) == {len(call.args)} and " +
                      (f"[*kwargs] == {list(call.kwargs)!r}" if call.kwargs else "not kwargs"))
        self._require("global_state() == STATE")
        arrays = self.snap.walk.arrays.values()
        if arrays:  # each is the very same, or the guards are compared one by one
            self.space["as_stamped"] = as_stamped
            self._require(f"as_stamped({self._fresh([a.value for a in arrays])}, "
                          f"{self._fresh([a.stamp for a in arrays])})")
        numbers = {number.source.path for number in self.snap.numbers}
        for source, value in self.snap.walk.roots[:-1]:
            if source.path not in numbers:
                self._value(source.path, value)

    def _value(self, expression: str, value: Any) -> None:
        """Requires that an expression gives an equal of ``value``."""
        if is_plain(value):
            self._require(f"same({expression}, {self._fresh(value)})")
        elif isinstance(value, torch.Tensor):
            self._volatile_tensor(expression, value)
        elif id(value) in self.names and id(value) in self.volatile:
            self._require(f"{expression} is {self.names[id(value)]}")
        elif isinstance(value, FunctionType) and id(value) in self.volatile:
            self._volatile_function(expression, value)
        elif id(value) in self.volatile:
            self._volatile_holder(expression, value)
        else:
            self._require(f"{expression} is {self._name(value)}")

    def _volatile_function(self, expression: str, function: FunctionType) -> None:
        name = self.names[id(function)] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(FunctionType)} and {name}.__code__ is "
                      f"{self._name(function.__code__)} and {name}.__globals__ is {self._name(function.__globals__)}"
                      f" and not {name}.__dict__")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self._value(f"{name}.{attribute}", getattr(function, attribute))
        for index, cell in enumerate(function.__closure__ or ()):
            if id(cell) in self.names:
                self._require(f"{name}.__closure__[{index}] is {self.names[id(cell)]}")
            else:
                held = self.names[id(cell)] = f"v{len(self.names)}"
                self.lines.append(f"{held} = {name}.__closure__[{index}]")
                self._value(f"{held}.cell_contents", cell.cell_contents)

    def _volatile_holder(self, expression: str, value: Any) -> None:
        name = self.names[id(value)] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(type(value))}")
        for place in self.places[id(value)]:
            holder = name
            if place.holder is not value:  # its attributes
                holder = f"{name}_d"
                self.lines.append(f"{holder} = {name}.__dict__")
                self.names[id(place.holder)] = holder
            if place.box in (boxes.MAPPING, boxes.ATTRIBUTES):
                keys = list(place.before)
                strings = all(type(key) in (str, int) for key in keys)
                self._require(f"[*{holder}] == {self._fresh(keys)}" if strings else
                              f"len({holder}) == {len(keys)} and identical({holder}, {self._fresh(keys)})")
            elif place.box is not boxes.SLOTS:
                self._require(f"len({holder}) == {len(place.before)}")
            if place.box in (boxes.SET, boxes.FROZENSET):
                self._require(f"{holder} == {self._fresh(type(value)(value))}")
                continue
            if len(place.before) > 8 and not place.ignored and all(is_plain(v) for v in place.before.values()):
                values = f"{holder}.values()" if isinstance(place.holder, dict) else holder
                self._require(f"all(map(same, {values}, {self._fresh(list(place.before.values()))}))")
                continue
            for key, inner in place.before.items():
                if key not in place.ignored:
                    self._value(self._at(place, key), inner)

    def _volatile_tensor(self, expression: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self.anchored_tensors:
            self._require(f"{expression} is {self.anchored_tensors[id(tensor)]}")
            return
        if id(tensor) in self.names:
            self._require(f"{expression} is {self.names[id(tensor)]}")
            return
        name = self.names[id(tensor)] = f"x{len(self.names)}"
        self.volatile_tensors.append((name, tensor))
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {self._name(type(tensor))} and {name}.shape == {self._fresh(tensor.shape)}"
                      f" and {name}.dtype is {self._fresh(tensor.dtype)}"
                      f" and {name}.device == {self._fresh(tensor.device)}"
                      f" and {name}.requires_grad is {tensor.requires_grad} and {name}.is_leaf is {tensor.is_leaf}"
                      f" and {name}.layout is {self._fresh(tensor.layout)}")
        if tensor.layout == torch.strided:
            self._require(f"{name}.stride() == {tensor.stride()}")
        if tensor.requires_grad:
            for key in ("grad", *HOOK_TABLES):
                if not (tensor.is_leaf or (key == "grad" and tensor.retains_grad)):
                    continue
                self._value(f"{name}.{key}", getattr(tensor, key))

    # anchored holders ----------------------------------------------------------------------------------

    def _anchored(self) -> None:
        """Compares anchored holders: their keys, then their values, as long lists; odd ones by themselves."""
        empty: list[Any] = []
        dicts: list[Any] = []  # keys of these are compared
        sizes: list[Any] = []  # the number of keys of these
        stable: list[Any] = []  # all values of these
        parts: list[tuple[Any, Any]] = []  # what a getter takes from these
        lists: list[Any] = []
        for place in filter(self._is_anchored, self.snap.places):
            special = [k for k, v in place.before.items() if k not in place.ignored and self._special(v, place)]
            if not place.before and place.box in (boxes.MAPPING, boxes.ATTRIBUTES, boxes.SET, boxes.LIST):
                empty.append(place.holder)
            elif place.box in (boxes.MAPPING, boxes.ATTRIBUTES, boxes.MODULE):
                if place.box is boxes.ATTRIBUTES:
                    sizes.append(place.holder)  # and looked up by key: nothing follows from their order
                elif all(type(key) in (str, int) for key in place.before):
                    dicts.append(place.holder)
                else:
                    holder, keys = self._name(place.holder), list(place.before)
                    self._require(f"len({holder}) == {len(keys)} and identical({holder}, {self._fresh(keys)})")
                plain = [k for k in place.before if k not in place.ignored and k not in special]
                if len(plain) == len(place.before) and place.box is not boxes.ATTRIBUTES:
                    stable.append(place.holder)
                elif plain:
                    parts.append((itemgetter(*plain, plain[0]), place.holder))
                if id(place.holder) not in self.whole:
                    self._one_by_one(place, special)
            elif place.box is boxes.LIST and not special and not place.ignored:
                lists.append(place.holder)
            else:
                self._odd(place, special)
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

    def _special(self, value: Any, place: Place) -> bool:
        """True for a value that is not compared by identity with the last one: it has a path of its own."""
        if isinstance(value, torch.Tensor):
            return place.box is not boxes.LIST or self._reads(value, place)
        return id(value) in self.volatile

    def _reads(self, tensor: torch.Tensor, place: Place) -> bool:
        """True when a list is where an anchored tensor is read from, not another way to reach it."""
        return self.snap.tensors[id(tensor)].source.path.startswith(place.source.path)

    def _one_by_one(self, place: Place, keys: Sequence[Any]) -> None:
        """Compares single values of an anchored holder."""
        for key in keys:
            value, expression = place.before[key], self._at(place, key)
            if isinstance(value, torch.Tensor):
                self._require(f"{expression} is {self.anchored_tensors[id(value)]}")
            elif id(value) in self.volatile:
                self._value(expression, value)
            else:
                self._require(f"{expression} is {self._name(value) if not is_plain(value) else self._fresh(value)}")

    def _odd(self, place: Place, special: Sequence[Any]) -> None:
        """Compares a holder that is neither a dict nor a plain list."""
        holder = self._name(place.holder)
        if place.box in (boxes.SET, boxes.DEQUE, boxes.LIST):
            self._require(f"len({holder}) == {len(place.before)}")
        if place.box is boxes.SET or (place.box is boxes.DEQUE and not special):
            self._require(f"identical({holder}, {self._fresh(list(place.holder))})")
            return
        self._one_by_one(place, [key for key in place.before if key not in place.ignored])
        if place.box is boxes.NAMES:
            absent = [name for name in place.holder.names if name not in place.before]
            if absent:
                table = self._name(place.holder.function.__globals__)
                self._require(f"{table}.keys().isdisjoint({self._fresh(absent)})")

    # memory and inputs ---------------------------------------------------------------------------------

    def _memory(self, mutated: frozenset[str]) -> None:
        """Volatile tensors are new objects, and share no memory that the step writes, unless they did so before."""
        written = {i for i, t in enumerate(self.tensors) if self.snap.tensors[id(t)].source.path in mutated}
        volatile_written = [self.snap.tensors[id(t)].source.path in mutated for _, t in self.volatile_tensors]
        anchored = Anchored(self.tensors, self.watched, written, any(volatile_written))
        self.anchored = anchored
        self.space |= {"anchored": anchored, "rebind": anchored.rebind, "LAST": anchored.last}
        if not self.volatile_tensors:
            return
        names = ", ".join(name for name, _ in self.volatile_tensors)
        self.lines.append(f"ids = {{*map(id, ({names},))}}")
        self._require(f"len(ids) == {len(self.volatile_tensors)} and anchored.ids.isdisjoint(ids)")
        if not written and not any(volatile_written):  # memory is no matter
            return
        addresses = [memory(t) for _, t in self.volatile_tensors]
        self.lines.append(f"m = [*map(memory, ({names},))]")
        if any(volatile_written) or not anchored.memory.isdisjoint(addresses):
            self.space["pattern"] = sharing_pattern
            expected = sharing_pattern(addresses, volatile_written, self.tensors)
            self._require(f"pattern(m, {self._fresh(volatile_written)}, t) == {self._fresh(expected)}")
        else:
            self._require("anchored.memory.isdisjoint(m)")

    def _inputs(self, inputs: Sequence[Source]) -> None:
        tensors = {f.source.path: f.tensor for f in self.snap.tensors.values()}
        numbers = {n.source.path: n for n in self.snap.numbers}
        volatile = {id(t): name for name, t in self.volatile_tensors}
        generators = {source.path: generator for generator, source in self.snap.walk.generators.values()}
        for number in self.snap.numbers:
            self._require(self._is_number(number))
        parts = []
        for source in inputs:
            if source.path in numbers:
                n = numbers[source.path]
                at = self._number(n)
                parts.append(at if n.group is None else f"float({at})" if n.index is None else f"{at}[{n.index}]")
            elif source.path in tensors:
                tensor = tensors[source.path]
                parts.append(self.anchored_tensors.get(id(tensor)) or volatile[id(tensor)])
            elif source.path in generators:
                parts.append(self._name(generators[source.path]))  # guarded by identity
            else:
                raise ValueError(f"{source} is not a tensor or number that the snapshot found")
        self.lines.append(f"return [{', '.join(parts)}]")

    def _number(self, number: Number) -> str:
        """An expression for a number that is an input, or for the tuple that it is in."""
        if number.place is not None:
            return self._at(number.place, number.key)
        return number.source.path if number.group is None else f"{self._name(number.group)}[{number.key!r}]"

    def _is_number(self, number: Number) -> str:
        at = self._number(number)
        if number.group is None:
            return f"type({at}) is {type(number.value).__name__}"
        if number.index is not None:
            length = len(number.group[number.key])
            return f"type({at}) is tuple and len({at}) == {length} and type({at}[{number.index}]) is float"
        return f"type({at}) is float" + f" or type({at}) is int" * (number.key == "lr")


@lru_cache(maxsize=64)
def compiled(text: str) -> CodeType:
    """The code object of generated text; captures that differ in their constants alone share it."""
    return compile(text, "<wholestep binder>", "exec")
