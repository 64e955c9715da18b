"""What is compared in bulk: the compiled form and a naive one say the same, and what holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wholestep.capture.guards import bulk, compared_values
from wholestep.capture.guards.bulk import ANY, flatten, native
from wholestep.capture.guards.fast_path import _in_slices


def matches(tables, empty):
    return bulk.match(flatten(tables, empty), tables, empty)


def gather(*args):
    return bulk.gather(bytearray(), *args)


def recall(*args):
    return bulk.recall(*args, bytearray())


def naively(tables, empty):
    return not any(empty) and all(
        len(table) == len(keys) and (not ordered or tuple(table) == keys) and
        all(key in table and (value is ANY or table[key] is value) for key, value in zip(keys, values, strict=True))
        for table, keys, values, ordered in tables
    )  # fmt: skip


FORMS = [naively, matches]
ONE, OTHER = object(), object()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_compared(form):
    table = {"a": ONE, 3: OTHER, "b": None}
    expected = (table, ("a", 3, "b"), (ONE, OTHER, None), True)
    assert form([expected], [{}])
    assert not form([expected], [{"x": 1}])
    assert not form([(*expected[:2], (ONE, OTHER, False), True)], [])
    assert form([(*expected[:2], (ONE, ANY, None), True)], [])
    assert not form([(table, ("a", 3), (ONE, OTHER), True)], [])
    assert not form([(table, ("a", 3, "b", "c"), (ONE, OTHER, None, ONE), True)], [])
    turned = {"b": None, "a": ONE, 3: OTHER}
    assert not form([(turned, *expected[1:])], []) and form([(turned, *expected[1:3], False)], [])
    assert not form([({"a": torch.ones(2)}, ("a",), (torch.ones(2),), True)], [])  # no element is compared


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(range(3))), max_size=4),
       st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(range(3))), max_size=4), st.booleans())
def test_both_forms_agree(was, now, ordered):
    before, after = dict(was), dict(now)
    values = tuple(ANY if value == 2 else value for value in before.values())
    entry = (after, tuple(before), values, ordered)
    same = all(after.get(key) is value or value is ANY for key, value in zip(before, values, strict=True))
    order = [*before] == [*after] if ordered else before.keys() == after.keys()
    assert {form([entry], []) for form in FORMS} == {order and same}


def test_bad_arguments():
    with pytest.raises(TypeError):
        matches([(1, 2, 3)], [])
    with pytest.raises(TypeError):
        matches((), [])
    with pytest.raises(TypeError):
        native.layouts((1,))
    with pytest.raises(TypeError):
        native.hooks((None,))
    with pytest.raises(TypeError):
        native.versions((None,), (1,))
    with pytest.raises(TypeError):
        native.versions((torch.ones(1),), ("a",))
    with pytest.raises(IndexError):
        native.advance((torch.ones(1),), ())
    assert bulk.identical([ONE, OTHER], (ONE, OTHER)) and not bulk.identical([ONE, OTHER], [ONE, ONE])
    with pytest.raises(TypeError):
        bulk.identical(1, [])
    with pytest.raises(ZeroDivisionError):
        bulk.identical([ONE], (1 // 0 for _ in "a"))


def test_values_are_gathered_where_keys_are_known():
    state = {ONE: {"step": 1, "sum": 2}, OTHER: {}}
    assert gather([{"a": 3, "b": 4}, {}], [state], [("step", "sum"), ()]) == [3, 4, 1, 2]
    for keys in ([("sum", "step"), ()], [("step",), ()], [("step", "sum")], [("step", "sum"), (), ()]):
        assert gather([], [state], keys) is None
    assert gather([], [], []) == [] and gather([], [{1: 2}], [()]) is None


CHANGES: list[Callable[[dict[object, object], str, object], object]] = [
    lambda table, key, value: table.update({key: value}), lambda table, key, value: table.pop(key, None),
    dict.setdefault, lambda table, key, value: vars(_Owner(table)).update({key: value}),
    lambda table, key, value: setattr(_Owner(table), key, value), lambda table, key, value: table and table.popitem(),
    lambda table, key, value: table.clear(), lambda table, key, value: table.__ior__({key: value}), dict.get,
]  # fmt: skip


class _Owner:
    """An object with a table as its attributes."""

    def __init__(self, table):
        self.__dict__ = table


@pytest.fixture(params=["by versions", "whole"])
def _versions(request):
    """Whether tables that have not changed are known by their versions, where Python has them."""
    native.use_versions(bulk.version_offset() if request.param == "by versions" else 0)
    yield
    native.use_versions(bulk.version_offset())


@pytest.mark.usefixtures("_versions")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from("abc"), st.sampled_from([ONE, OTHER, ANY])),
                max_size=8), st.booleans(), st.booleans())  # fmt: skip
def test_changes_of_tables_are_seen(changes, ordered, nested):
    table: dict[object, object] = {"a": ONE, "b": OTHER}
    entry, memo, outer = (table, ("a", "b"), (ONE, ANY), ordered), bytearray(), {ONE: table}
    flat, last = flatten([entry], []), [None] * 2
    weak = (weakref.ref(_Owner({})), None)
    for change, key, value in [(dict.get, "a", None), *changes]:
        change(table, key, value)
        assert bulk.match(flat, [entry], []) == bulk.match(flat, [entry], []) == naively([entry], [])
        for _ in range(2):
            if nested:
                found = bulk.gather(memo, [], [outer], [("a", "b")])
                assert found == (list(table.values()) if list(table) == ["a", "b"] else None)
            else:
                found = bulk.gather(memo, [table], [], [])
                assert found == list(table.values())
            if found is not None:
                assert not bulk.recall(found, weak, last, memo)  # others than these were there


@pytest.mark.usefixtures("_versions")
def test_tensors_of_tables_are_recalled_where_they_are_the_last_ones():
    table, memo = {"a": torch.ones(1), "b": torch.ones(2)}, bytearray()
    more = torch.ones(3)
    weak, last = tuple([weakref.ref(t) for t in (*table.values(), more)]), [None] * 3
    for _ in range(3):
        found = [*bulk.gather(memo, [table], [], []), more]
        assert bulk.recall(found, weak, last, memo) and last == found
        last[:] = [None] * 3
        assert not bulk.recall([*found[:2], None], weak, last, memo) and last[2] is more
    table["b"] = torch.ones(2)
    for _ in range(2):
        assert not bulk.recall([*bulk.gather(memo, [table], [], []), more], weak, last, memo)


def test_what_lives_is_recalled():
    tensors = [torch.ones(1), torch.ones(2)]
    weak = (weakref.ref(tensors[0]), None, weakref.ref(tensors[1]))
    last: list[object] = [None] * 3
    assert recall([tensors[0], None, tensors[1]], weak, last) and last[0] is tensors[0] and last[1] is None
    assert not recall([tensors[1], None, tensors[1]], weak, last) and last[2] is tensors[1]
    assert not recall([tensors[0], None], weak, last)
    last.clear()
    del tensors[1]
    last = [None] * 3
    assert recall([tensors[0], None, None], weak, last) and last[2] is None


def _set(name: str, value: object) -> Callable[[torch.Tensor], object]:
    return lambda t: setattr(t, name, value)


LAYOUTS: list[Callable[[torch.Tensor], object]] = [
    _set("data", torch.ones(3, 2)), _set("data", torch.ones(3, 2).t()), _set("data", torch.ones(2, 3, 1)),
    _set("data", torch.ones(2, 3, dtype=torch.float64)), _set("data", torch.ones(1)), lambda t: t.requires_grad_(),
    lambda t: t.resize_(2, 4), lambda t: t.unsqueeze_(0), lambda t: t.set_(torch.ones(2, 6)[:, ::2]),
]  # fmt: skip


@pytest.mark.parametrize("change", LAYOUTS)
def test_layouts(change):
    first, changed = torch.ones(2, 3), torch.ones(2, 3)
    change(changed)
    for form in {bulk._layouts, bulk.layouts_of([first])}:
        kept = form((first, torch.ones(2, 3)))
        assert kept == form((torch.zeros(2, 3), first)) and kept != form((first, changed)) and kept != form((first,))


def test_layouts_of_many_dimensions_and_of_none():
    tensors = (*(torch.ones([1] * dim) for dim in (0, 64, 30, 64)), torch.ones(0), torch.ones(1, 0))
    for form in {bulk._layouts, bulk.layouts_of(tensors)}:
        assert form(tensors) == form(tuple([t.clone() for t in tensors])) and form(()) == form(())
    assert bulk.layouts_of([torch.ones(2).to_sparse()]) is bulk._layouts


def test_hooks_that_tensors_have():
    tensors = tuple([torch.ones(1, requires_grad=True) for _ in range(3)])
    assert bulk.hooks(tensors) == bulk._hooks(tensors) == []
    removed = tensors[1].register_hook(print)
    tensors[2].register_post_accumulate_grad_hook(print)
    assert bulk.hooks(tensors) == bulk._hooks(tensors) and [i for i, _ in bulk.hooks(tensors)] == [2, 5]
    removed.remove()
    tensors[1]._backward_hooks = None
    assert bulk.hooks(tensors) == bulk._hooks(tensors) and [i for i, _ in bulk.hooks(tensors)] == [5]


def test_gradients_of_tensors():
    tensors = tuple([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    tensors[1].grad = torch.zeros(2)
    for form in (bulk.grads, bulk._grads):
        found = form(tensors)
        assert found[0] is None and found[1] is tensors[1].grad and found[2] is None and form(()) == []


def test_version_counters():
    tensors = torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2)[0]
    for goal in ((1, 0, 3), (200, 5, 3), (0, 4, 1)):  # some steps, many, back
        bulk.count_writes(tensors, goal)
        for form in (bulk.versions, bulk._versions):
            assert form(tensors, (0, 0, 0)) == goal and form(tensors, (1, 0, 2)) == (goal[0] + 1, goal[1], goal[2] + 2)
    view = tensors[0][:1]
    bulk.count_writes((tensors[0], view), (7, 9))
    assert tensors[0]._version == view._version == 9
    with torch.inference_mode():
        uncounted = torch.ones(1)
    for form in (bulk.versions, bulk._versions, bulk.count_writes):
        with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
            form((uncounted,), (1,))


SETTINGS: list[tuple[Callable[[], object], Callable[[object], object], object]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled, False),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    *((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), True)
      for kind in ("cpu", "cuda")),
    *((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind), torch.float64)
      for kind in ("cpu", "cuda")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("form", ["global_state", "quick_state"])
def test_settings_are_told_apart(number, form):
    get, put, value = SETTINGS[number]
    state, before = getattr(compared_values, form), get()
    first = state()
    put(value)
    try:
        assert state() != first
    finally:
        put(before)
    assert state() == first


def test_inference_mode_is_told_apart():
    first = compared_values.quick_state()
    with torch.inference_mode():
        assert compared_values.quick_settings() != first[0]
    assert compared_values.quick_state() == first


def test_inputs_that_follow_each_other_are_sliced():
    places = {f"t[{i}]": i for i in range(6)}
    for expressions, code in (
        (["x", *places, "y"], ["x", "*t[0:6]", "y"]), (["t[2]", "t[3]", "x", "t[4]"], ["t[2]", "t[3]", "x", "t[4]"]),
        (["t[3]", "t[4]", "t[5]", "t[0]"], ["*t[3:6]", "t[0]"]), (["x", "y"], ["x", "y"]), ([], []),
    ):  # fmt: skip
        assert _in_slices(expressions, places) == code
