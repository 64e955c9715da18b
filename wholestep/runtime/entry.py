"""An entry: a captured program with its guards, and what a call does around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from wholestep.capture import Args, Binder, Guard, GuardFailure, Kwargs
from wholestep.capture.guards.bulk import count_writes, versions
from wholestep.capture.sources import Decision
from wholestep.functional import Decided, Diverged
from wholestep.ir import is_effectful
from wholestep.runtime.asked_results import note
from wholestep.runtime.autograd_function import CompiledFunction, Plan, Ran, plan_of
from wholestep.runtime.output_aliases import are_spent, as_inference, remade, spent
from wholestep.runtime.program import DonatedInputs, Program
from wholestep.tensor_parts import Part, mark_part
from wholestep.torch_compat import make_one_of_several
from wholestep.trace import Traced
from wholestep.trace.numbers.decisions import outcomes_of
from wholestep.trace.record.inputs import QUESTIONS, flat_memory

# Called once it is clear which program serves a call, before it runs.
Ready = Callable[[], Any] | None


class EarlyExit:
    """The decisions at which a program may end early: up to the last, it has written nothing but generators' states.

    Attributes:
        guards: them, in order.
        outcomes: what Python went on with at each.
    """

    def __init__(self, traced: Traced, decided: Sequence[Decided]) -> None:
        self.guards = [Guard(Decision(d.text), f"decided at {d.line}", d.expected) for d in decided]
        self.outcomes = outcomes_of(traced.step.graph)
        calls = [n for n in traced.step.graph.nodes if n.op == "call_function" and is_effectful(n)]
        self._draws = any(not isinstance(n.target, Decided) for n in calls)
        self._generators = [i for i, item in enumerate(traced.inputs) if isinstance(item.value, torch.Generator)]

    @classmethod
    def of(cls, traced: Traced) -> EarlyExit | None:
        """Those of what was traced; None where there are none."""
        decided = [node.target for node in traced.step.graph.nodes if isinstance(node.target, Decided)]
        return cls(traced, decided) if decided else None

    def attempt(self, values: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Runs the program; where it ends at a decision, all is as before, and the failure says which it was."""
        generators = [torch.default_generator, *(values[i] for i in self._generators)] if self._draws else []
        before = [generator.get_state() for generator in generators]
        try:
            return run()
        except Diverged as decision:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
            known = self.outcomes[: decision.decided.index]
            return GuardFailure(str(decision), outcomes=(*known, repr(decision.found)))


class Entry:
    """A program, the guards under which it serves, and how it reaches into the user's objects.

    Args:
        traced: what tracing recorded.
        binder: made by capture for the inputs that have a source, in order.
        program: shared with other entries of the same fingerprint.
        releases: whether gradients that the step replaces unread go before it runs: not where a program of the
            user's own may fail and everything shall then be as it was.
        terms: what the ranks have agreed on, for them to compare.
        donated: what each call gives up of its first argument.
    """

    def __init__(
        self, traced: Traced, binder: Binder, program: Program, releases: bool = False, terms: Any = None,
        donated: DonatedInputs | None = None,
    ) -> None:  # fmt: skip
        self.shapes: set[Hashable] = set()  # of arguments that it has served, where it is one of many for various ones
        self.traced, self.binder, self.program, self.terms = traced, binder, program, terms
        self.donated, self.early_exit = donated, EarlyExit.of(traced)
        self.releases = releases and self.early_exit is None  # another program may have to begin where this one did
        derivative = traced.derivative
        self.count = traced.n_inputs
        kept = {o: p for o, p in enumerate(program.kept) if isinstance(p, Part)}
        self.kept = {k: kept[s.output] for k, s in enumerate(traced.aliases) if s.output in kept}
        self.flat = [i for i, x in enumerate(traced.inputs) if x.members]  # the first members of shared memories
        # inputs for which eager counts writes, and how many; views of one memory have one counter: it is set, not moved
        self.written, self.times = list(traced.versions), tuple(traced.versions.values())
        slots = list(enumerate(traced.aliases))
        self.inference = {a.output for a in traced.aliases if a.state.inference and a.output is not None}
        plain = [(i, s) for i, s in slots if not s.state.inference]
        self.several = [i for i, s in plain if s.state.several and s.by_strides]
        # nothing was counted for what a program gives; eager may count writes
        fresh = [(i, s) for i, s in plain if s.counter != "shared" and s.state.version]
        # what is made, bases before their views, and for which of it writes are counted, and how many
        self.phases: list[tuple[list[int], list[int], tuple[int, ...]]] = []
        for views in (False, True):
            counted = {i: s.state.version for i, s in fresh if (s.base is not None) is views}
            made = [i for i, s in slots if (s.base is not None) is views]
            self.phases.append((made, list(counted), tuple(counted.values())))
        moved = {i for i, _ in traced.moved}
        # what lies in the memory that inputs leave, then in that which they are given
        leaving = [i for i, s in slots if s.input in moved and not s.moved]
        self.before_moves = [*dict.fromkeys([*leaving, *(i for _, i in traced.moved)])]
        self.handle = torch.zeros((), requires_grad=True)
        self.spent = are_spent(traced.aliases)
        self.plan = plan_of(traced, program)
        # an input's memory is written again, with a history, when the forward has run
        self.copied = set(traced.step.signature.mutations) if derivative and derivative.rewritten else set()
        if self.plan is not None:
            whole = [s for s in traced.aliases if s.views is None]
            versions = {("output", s.output): s.state.version for s in whole if s.state.version}
            self.saved_versions = {place: versions[place] for place in self.plan.backward.saved if place in versions}
        self.graded = [(i, s.grad) for i, s in enumerate(traced.aliases) if s.state.retains or s.grad is not None]
        sources = [item.source for item in traced.inputs]
        self.many, self.aliases = traced.many, traced.aliases
        places = {source.path: index for index, source in enumerate(sources)}
        self.sized = [places[path] for path in self.many.in_order] if self.many is not None else []
        # what is asked of inputs before the program runs: which, how it is found, what it was, in words
        self.checks: list[tuple[int, Callable[[Any], Any], Any, str]] = [
            (i, QUESTIONS[name], n, f"{sources[i]} {name}: expected {n}") for i, name, n in traced.answers
        ]
        self.guards = [
            *binder.guards,
            *(Guard(Decision(text), why, True) for text, why in (self.many.conditions if self.many else ())),
            *(Guard(sources[i], name, before) for i, name, before in traced.answers),
            *(Guard(Decision(p.text), f"decided at {p.line}", p.expected) for p in traced.predicates),
            *(self.early_exit.guards if self.early_exit is not None else ()),
        ]
        # the first call's tensors and the graph would else live as long as the program
        self.traced = replace(traced, step=None, inputs=[])  # type: ignore[arg-type]

    def may_follow(self, outcomes: tuple[str, ...]) -> bool:
        """Whether the program may serve a call whose first decisions have these outcomes."""
        return self.early_exit is None or self.early_exit.outcomes[: len(outcomes)] == outcomes

    def __call__(self, values: list[Any], args: Args, kwargs: Kwargs, ready: Ready = None) -> Any:
        """Runs the step, or says why this program does not serve the call (`GuardFailure`).

        Args:
            values: what the binder gave for the call; is changed.
            ready: called once it is clear that the program serves, before it runs.
        """
        if self.many is not None:
            served = self.many.serve([values[i] for i in self.sized])
            if isinstance(served, str):
                return GuardFailure(served)
            self.aliases = served
        for index, read, expected, words in self.checks:
            found = read(values[index])
            if found != expected:
                return GuardFailure(f"{words}, found {found}")
        for index in self.flat:
            values[index] = flat_memory(values[index])
        for predicate in self.traced.predicates:
            if not predicate.holds(values):
                return GuardFailure(predicate.reason, by_value=True)
        if ready is not None:
            ready()
        # with gradients on, the program and its node see to it themselves
        with nullcontext() if self.plan is not None and torch.is_grad_enabled() else torch.no_grad():
            if self.early_exit is None:
                result = self._run(values, args, kwargs)
            else:
                result = self.early_exit.attempt(values, partial(self._run, values, args, kwargs))
                if type(result) is GuardFailure:
                    return result
        if self.traced.grad_mode is not None:
            torch.set_grad_enabled(self.traced.grad_mode)
        return result

    def _run(self, values: list[Any], args: Args, kwargs: Kwargs) -> Any:
        traced = self.traced
        if self.releases:
            self.binder.path.release()
        for index, before, after in traced.storage_sizes:
            if after > before:
                values[index].untyped_storage().resize_(after)
        written = tuple([values[i] for i in self.written])
        counts = versions(written, self.times)
        slots: dict[int, torch.Tensor] = {}
        if self.plan is None:
            outputs = self._outputs(values, args)
        else:
            outputs, slots, node = self._differentiable(self.plan, values, written, counts)
        for index, before, after in traced.storage_sizes:
            if after < before:
                values[index].untyped_storage().resize_(after)
        if self.inference:
            outputs = as_inference(outputs, self.inference)
        if written:
            count_writes(written, counts)
        for index in self.before_moves:
            if index not in slots:
                slots[index] = remade(self.aliases[index], outputs, values, slots, self.handle)
        for index, alias in traced.moved:
            values[index].data = slots[alias]
        # views come last: autograd knows one by its operators as long as its counter is what it was when it was made
        for making, fresh, counted in self.phases:
            for index in making:
                if index in self.spent:
                    slots[index] = spent(outputs[self.aliases[index].output])  # type: ignore[index]
                elif index not in slots:
                    slots[index] = remade(self.aliases[index], outputs, values, slots, self.handle)
            if fresh:
                count_writes(tuple([slots[i] for i in fresh]), counted)
        for index in self.several:
            make_one_of_several(slots[index], traced.aliases[index].state.outdated)
        for index, part in self.kept.items():
            mark_part(slots[index], part)
        for index, grad in self.graded:
            if traced.aliases[index].state.retains:
                slots[index].retain_grad()
            slots[index].grad = None if grad is None else slots[grad]
        if self.plan is not None and self.plan.derivative.between and node is not None:
            inputs = {k: values[index] for index, _, k in self.plan.derivative.rewritten}
            between = self.plan.derivative.between
            note(node, [(inputs[k] if i is None else slots[i], through) for i, k, through in between])
        made = [slots[m.alias] if m.alias is not None else outputs[m.output] for m in traced.new_values]  # type: ignore[index]
        return self.binder.path.apply(args, kwargs, made)

    def _outputs(self, values: list[Any], args: Args) -> Sequence[Any]:
        if self.donated is None:
            return self.program.run(*values[: self.count])
        inputs = values[: self.count]
        self.donated.take(args[0], values)
        return self.program.consume(inputs)

    def _differentiable(
        self, plan: Plan, values: list[Any], written: tuple[torch.Tensor, ...], counts: tuple[int, ...]
    ) -> tuple[Sequence[Any], dict[int, torch.Tensor], Any]:
        """Runs the forward as one node of autograd's graph; gives all outputs, the slots with a history, and the node.

        Counters are set before values are saved: one that moves afterwards is an error in the backward.
        """
        traced, derivative = self.traced, plan.derivative
        inputs = values if self.count == len(values) else values[: self.count]
        outputs = list(self.program.run(*inputs))
        saved = [values[i] if where == "input" else outputs[i] for where, i in plan.backward.saved]
        if traced.moved:
            left = {id(values[i]) for i, _ in traced.moved}
            saved = [value.detach() if id(value) in left else value for value in saved]
        if written or self.saved_versions:
            count_writes(written, counts)
            self._count_saved(plan, saved)
        if self.copied:
            again = [where == "output" and i in self.copied for where, i in plan.backward.saved]
            saved = [v.detach().clone() if copy else v for v, copy in zip(saved, again, strict=True)]
        del outputs[derivative.n_forward :]
        new_value = {k: out for _, out, k in derivative.rewritten} if derivative.rewritten else {}
        bare = tuple([
            outputs[new_value[k]] if slot is None else remade(traced.aliases[slot], outputs, values, {}, None)
            for k, slot in enumerate(derivative.outputs)
        ])
        slots = {k: remade(traced.aliases[k], outputs, values, {}, self.handle) for k in derivative.made}
        ran = Ran(bare, saved, [values[i] for i in derivative.late] if derivative.late else ())
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            results = CompiledFunction.of(plan, ran, [*[values[i] for i in derivative.inputs], *slots.values()])
            for index, _, k in derivative.rewritten:
                values[index].copy_(results[k])
        for slot, tensor in zip(derivative.outputs, results, strict=True):
            if slot is not None:
                slots[slot] = tensor
        return outputs, slots, results[0].grad_fn

    def _count_saved(self, plan: Plan, saved: list[Any]) -> None:
        """Counts writes to what is saved, before it is saved."""
        places = zip(saved, plan.backward.saved, strict=True)
        counted = [value for value, place in places if place in self.saved_versions]
        count_writes(tuple(counted), tuple(self.saved_versions.values()))
