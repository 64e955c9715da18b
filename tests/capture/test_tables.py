"""Dictionaries compared in bulk: the compiled form and the Python one say the same, and what holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.capture.guards.compared_values import ANY, _match, match, native

FORMS = [_match] if native is None else [_match, match]
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
    if native is not None:
        with pytest.raises(TypeError):
            match([(1, 2, 3)], [])
        with pytest.raises(TypeError):
            match((), [])
