"""What we know of torch's private names: each test fails when torch moves the name or changes what it does."""

from __future__ import annotations

import ast
import ctypes
import functools
import sys
import threading
import types
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from wholestep import torch_compat
from wholestep.aot_autograd.autograd_graph import Shape
from wholestep.fake_layouts import strict_fake_mode
from wholestep.patches import patched
from wholestep.torch_compat import (
    BACKWARD_ENGINE,
    CHECKPOINT_OPERATORS,
    COLLECTIVE_NAMESPACES,
    COMPILED_OPERATORS,
    CROSS_ENTROPY,
    CUMPROD_BY_DATA,
    DESCRIBING_MODULES,
    FOREACH_SUPPORT,
    FOUND_ON_ENTRY,
    FUNCTION_MODES,
    GET_BASE,
    GET_VERSION,
    HOOK_TABLES,
    IS_ALL_TRUE,
    IS_VIEW,
    PACKED_SEQUENCES,
    PROFILER,
    SINGLE_TENSOR_UPDATES,
    TENSOR_BASE,
    UNSCALE_GRADIENTS,
    BatchNorm,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    ShapeEnvironment,
    TorchDispatchMode,
    UnwrappedDispatchMode,
    address_of,
    as_called,
    asks_for_full_state,
    at_end_of_backward,
    attention_kernels,
    backward_reaches,
    begin_profiled_range,
    behind,
    below_autograd,
    casts,
    casts_where_called,
    checkpoint_contexts,
    compile_with_inductor,
    count_dispatch_modes,
    current_autograd_node,
    decomposition_of,
    default_device,
    direct_call,
    dispatch_modes_active,
    dispatch_modes_off,
    dispatching,
    empty_fake,
    engine_compiler,
    equal_expressions,
    evaluated,
    expression_of,
    fake_of,
    fake_refusal,
    fake_view,
    floats_as_tensors,
    full_precision,
    function_modes,
    function_modes_disabled,
    function_modes_enabled,
    function_modes_off,
    generator_id,
    global_hooks,
    gloo_options,
    has_foreach_support,
    has_native_kernel,
    has_storage,
    held_by_cpp,
    inductor_kernels,
    innermost_saved_tensor_hooks,
    is_batched,
    is_deferring,
    is_fakes_own,
    is_fx_symbolic_tracing,
    is_inside,
    is_linearized,
    is_one_of_several,
    is_one_operator,
    is_packed,
    is_zero_tensor,
    kernel_settings,
    layout_functions,
    lazy_graph_module,
    make_one_of_several,
    make_optimizer_state,
    makes_subclass,
    matrix_product,
    mkl_square_root,
    modes_active,
    needs_memory,
    nested_compiles,
    nll_loss_backward,
    no_modes,
    node_sequence_number,
    openmp,
    others_pack_saved_tensors,
    parse_schema,
    plain_subclasses,
    plain_tensor,
    plain_torch_function,
    python_flags,
    python_text,
    refresh_flat_weights,
    refuse_addresses,
    refusing_backward,
    replaced_kernels,
    saved_as_it_is,
    saved_numbers,
    sequence_number,
    set_grad_mode,
    set_versions,
    setting_addresses,
    setting_functions,
    simplified,
    size_symbol,
    skipped_by_dynamo,
    storage_id,
    storage_uses,
    tensor_functions,
    tensor_offsets,
    transforms_active,
    tree_map,
    tree_map_only,
    unseen_fakes,
    viewed,
    wait_collective,
    with_autograd,
    without_autocast,
    without_saved_tensor_hooks,
)

aten = torch.ops.aten


def public_names(path: str) -> set[str]:
    """Names that a file defines, or imports as themselves to hand them on."""
    names: set[str] = set()
    for node in ast.parse(Path(path).read_text(encoding="utf8")).body:
        if isinstance(node, ast.ImportFrom):
            names |= {a.name for a in node.names if a.asname == a.name}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def names_used_in_tests(path: str) -> set[str]:
    """Names that the bodies of a file's tests read."""
    tests = [n for n in ast.parse(Path(path).read_text(encoding="utf8")).body if isinstance(n, ast.FunctionDef)]
    return {n.id for test in tests if test.name.startswith("test_") for n in ast.walk(test) if isinstance(n, ast.Name)}


class Seen(TorchDispatchMode):
    """Collects the operators that reach the dispatcher's last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpOverload] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode():
    with Seen() as seen:
        torch.ones(2).add_(1)
    assert isinstance(seen, TorchDispatchMode)
    assert seen.ops == [torch.ops.aten.ones.default, torch.ops.aten.add_.Tensor]
    torch.ones(2)
    assert len(seen.ops) == 2, "none after the block"


class Heard(TorchFunctionMode):
    """Counts the calls of torch's functions."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_every_name_has_a_test_here():
    assert public_names(torch_compat.__file__) - names_used_in_tests(__file__) == set()


def test_torchs_getters_of_full_states_are_seen():
    asked: list[bool] = []
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters())
    for holder in (model, opt):
        holder.register_state_dict_post_hook(lambda *_: asked.append(asks_for_full_state()))
    for full in (True, False):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=full))
        get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=full))
    model.state_dict()
    assert asked == sorted(asked, reverse=True) and asked.count(True) == asked.count(False) - 1


def test_profilers_show_ranges_that_are_begun_and_ended_by_hand():
    table, key = PROFILER
    assert table[key] is False
    with torch.profiler.profile(record_shapes=True) as profile:
        assert table[key] is True
        begin_profiled_range("by_hand", torch.ones(2, 3))()
    (event,) = [event for event in profile.events() if event.name == "by_hand"]
    assert event.input_shapes == [[2, 3]]


def test_operators_are_overloads():
    assert isinstance(aten.add.Tensor, OpOverload) and not isinstance(aten.add, OpOverload)
    assert aten.add.Tensor.name() == "aten::add.Tensor"


def test_fake_tensors_have_a_shape_and_no_values():
    with FakeTensorMode() as mode:
        x = torch.empty(2, 3) @ torch.empty(3, 4)
    assert isinstance(x, FakeTensor) and x.shape == (2, 4) and x.fake_mode is mode
    assert not isinstance(torch.empty(2), FakeTensor)
    assert isinstance(mode.from_tensor(torch.ones(5)), FakeTensor)


def test_a_fake_of_a_tensor_has_its_place_in_memory_and_views_share_it():
    for real in (torch.empty(30)[6:].view(4, 6).t(), torch.ones(2, 3), torch.ones(2, dtype=torch.complex64).conj()):
        mode = FakeTensorMode()
        fake = fake_of(mode, real)
        assert isinstance(fake, FakeTensor) and fake.fake_mode is mode and fake.device == real.device
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.storage_offset() == real.storage_offset() and fake.is_conj() == real.is_conj()
        assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    view = fake_view(fake := fake_of(mode, torch.ones(2, 3)), torch.empty(6)[2:5])
    assert (view.shape, view.storage_offset(), view.fake_mode) == ((3,), 2, fake.fake_mode)
    assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata


def test_an_empty_fake_is_laid_out_like_its_model():
    mode, like = FakeTensorMode(), torch.empty(4, 3, dtype=torch.bfloat16).t()[1:]
    with mode:
        fake = empty_fake(mode, like)
        other = empty_fake(mode, like, ((2, 3), (1, 2)))
        assert (other.shape, other.stride(), other.dtype) == ((2, 3), (1, 2), like.dtype)
    assert isinstance(fake, FakeTensor) and fake.fake_mode is mode
    assert (fake.shape, fake.stride(), fake.storage_offset()) == ((2, 4), like.stride(), 0)
    assert (fake.dtype, fake.device) == (like.dtype, like.device)
    assert isinstance(fake + 1, FakeTensor), "the mode works on it"


def test_a_lazy_graph_module_is_written_when_it_is_read():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), graph.get_attr("one"))))
    module = lazy_graph_module({"one": torch.ones(1)}, graph)
    assert isinstance(module, torch.fx.GraphModule) and "_code" not in vars(module)
    assert module(torch.ones(1)) == 2 and "torch.add" in module.code


def _with_a_symbol() -> tuple[Any, ...]:
    """The arguments of `torch.lstm`, whose batch has a size without a value."""
    cell, env = torch.nn.LSTM(2, 3), ShapeEnvironment(lambda: "")
    size = size_symbol(env, "batch", 4)[1]
    with strict_fake_mode(env):
        x, hidden = torch.empty(5, size, 2), torch.empty(1, size, 3)
        weights = [torch.empty(p.shape) for p in cell.parameters()]
    return x, [hidden, hidden], weights, True, 1, 0.0, False, False, False


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: bool(torch.ones(()) > 0), "data"),
        (lambda: torch.ones(3).nonzero(), "data"),
        (lambda: torch.ones(3, device="meta") + torch.ones(3), "device"),
        (lambda: torch.ops.wholestep_test_compat.without_a_rule(torch.ones(1)), "operator"),
        (lambda: torch._nested_tensor_from_mask(torch.ones(1, 2, 1), torch.ones(1, 2) > 0), "operator"),
        (lambda: torch.lstm(*_with_a_symbol()), "symbols"),
        (lambda: torch.ones(3).share_memory_(), "memory"),
        (lambda: torch.ones(3) @ torch.ones(4), None),
    ],
)
def test_the_refusals_of_fake_tensors_are_told_from_operators_errors(call, kind: str | None):
    library = torch.library.Library("wholestep_test_compat", "FRAGMENT")
    library.define("without_a_rule(Tensor x) -> Tensor")
    try:
        with FakeTensorMode(), pytest.raises(RuntimeError) as raised:
            call()
    finally:
        library._destroy()
    assert fake_refusal(raised.value) == kind


def test_below_autograd_no_graph_is_made_and_no_version_counted():
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2)
    with below_autograd():
        assert not (x * 2).requires_grad
        x.add_(1)  # a leaf that requires gradients: autograd would refuse
        y.add_(1)
        assert y[0:1]._base is None
    assert x._version == 0 and y._version == 0
    assert x.tolist() == [2.0, 2.0] and (x * 2).requires_grad
    with below_autograd(), with_autograd():
        assert (x * 2).requires_grad
        assert y.add_(1)._version == 1 and y[0:1]._base is y


def test_autocast_is_off_below_and_as_it_was_where_operators_were_called():
    x, seen = torch.ones(2, 2), []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args)
            if func is aten.neg.default:
                with as_called(autograd=False):
                    seen.append((casts(), casts_where_called(), (x @ x).dtype))
            return found

    assert not casts()
    for enabled, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        with torch.autocast("cpu", enabled=enabled):
            with without_autocast():
                assert not casts() and (x @ x).dtype == torch.float32
            with below_autograd():
                assert not casts() and (x @ x).dtype == torch.float32
            with Mode():
                x.neg()
            assert casts() is enabled and seen.pop() == (enabled, enabled, dtype)


def test_a_native_kernel_is_one_of_the_devices_own():
    assert has_native_kernel(aten.mm.default, "CPU")
    assert not has_native_kernel(aten.linear.default, "CPU"), "made of other operators"
    assert not has_native_kernel(aten.sym_size.default, "CPU"), "unknown to the dispatcher"


def test_decompositions_are_in_calls_with_the_same_results():
    x = torch.randn(3, 4, dtype=torch.float64)
    for op, args in ((aten._softmax.default, (1, False)), (aten.native_layer_norm.default, ([4], None, None, 1e-5))):
        torch.testing.assert_close(decomposition_of(op)(x, *args), op(x, *args))
    stats = [torch.rand(4, dtype=torch.float64) for _ in range(4)]
    arguments = x, *stats, True, 0.1, 1e-5
    tracked = decomposition_of(aten._native_batch_norm_legit_functional.default)(*arguments)
    torch.testing.assert_close(tracked, aten._native_batch_norm_legit_functional.default(*arguments))


def test_functions_that_are_one_operator():
    whole = (torch._fused_adam_, torch._foreach_add_, torch.Tensor.normal_, aten.leaky_relu, aten.mm.default)
    made_of_others = (torch.nn.functional.interpolate, torch.tensor, torch.layer_norm, aten.upsample_nearest2d.vec)
    assert all(map(is_one_operator, whole)) and not any(map(is_one_operator, made_of_others))


def test_fake_tensors_are_not_told_by_name_but_in_torch_itself():
    owner, name, hidden = unseen_fakes()
    assert getattr(owner, name) is FakeTensor
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not isinstance(fake, hidden) and issubclass(FakeTensor, hidden)
    assert not isinstance(torch.ones(2), hidden)
    with patched([(owner, name, hidden)], lambda: True):
        assert not isinstance(fake, getattr(owner, name)) and torch._subclasses.fake_utils.FakeTensor is FakeTensor
    with patched([(owner, name, hidden)], lambda: False):
        assert isinstance(fake, getattr(owner, name))


def test_versions_are_set():
    tensors = (torch.ones(1), torch.ones(1))
    set_versions(tensors, (3, 7))
    assert [t._version for t in tensors] == [3, 7]
    tensors[0].add_(1)
    assert tensors[0]._version == 4


def test_sizes_of_one_have_strides_of_their_own_in_torchs_rule_for_views():
    real = torch.empty(20).as_strided((1, 2, 4, 1), (4, 4, 1, 4), 3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        assert fake.view(1, 2, 4).stride() == (4, 4, 1)
    view = viewed(fake, torch.Size((1, 2, 4)))
    assert view.stride() == real.view(1, 2, 4).stride() == (8, 4, 1) and view.storage_offset() == 3
    assert view.device == real.device and storage_id(view.untyped_storage()) == storage_id(fake.untyped_storage())


def test_the_default_device_is_known_by_function_modes():
    assert default_device() == torch.get_default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert default_device() == torch.device("meta") and not modes_active()
    for mode in (Seen(), TorchFunctionMode()):
        with mode:
            assert modes_active()
    torch.set_default_device("meta")
    try:
        assert default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]


def test_grad_mode_is_set_and_transforms_are_seen():
    set_grad_mode(False)
    assert not torch.is_grad_enabled()
    set_grad_mode(True)
    assert torch.is_grad_enabled() and not transforms_active()
    assert torch.func.grad(lambda x: x if transforms_active() else x * float("nan"))(torch.ones(())).item() == 1
    seen = []
    torch.jit.trace(lambda x: seen.append(torch.jit.is_tracing()) or x * 2, torch.ones(2))
    assert seen[0] and not torch.jit.is_tracing()
    torch.fx.symbolic_trace(lambda x: seen.append(is_fx_symbolic_tracing()) or x * 2)
    assert seen[-1] and not is_fx_symbolic_tracing()


def test_a_subclass_that_a_mode_keeps_from_being_made_is_known_by_its_error() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    kind, seen = type("Kind", (torch.Tensor,), {}), []
    try:
        with Mode():
            kind(torch.ones(2))
    except RuntimeError as error:
        seen += [makes_subclass(error), needs_memory(error)]
    assert seen == [True, True] and not makes_subclass(RuntimeError("another"))
    with FakeTensorMode(), pytest.raises(RuntimeError) as error:
        torch._shape_as_tensor(torch.ones(2))
    assert needs_memory(error.value) and not needs_memory(RuntimeError("another")) and not needs_memory(None)


def test_many_gradients_in_one_are_seen():
    seen, x = [], torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append(is_batched(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_sizes_become_symbols_and_numbers_again():
    env = ShapeEnvironment(lambda: "here")
    rows, number = size_symbol(env, "x.shape[0]", 6)
    columns, other = size_symbol(env, "x.shape[1]", 4)
    with strict_fake_mode(env):
        x = torch.empty(number, other)
        y = x.view(-1)
    assert evaluated(y.shape[0], {rows: 3, columns: 5}) == 15 and evaluated(number > 4, {rows: 3}) is False
    assert expression_of(y.shape[0]) == rows * columns and expression_of(7) == 7
    size = y.shape[0]
    assert equal_expressions(size * (size - 1) + size, size**2) and not equal_expressions(size, 8)
    assert simplified(y.shape[0]) == rows * columns and simplified(7) == 7
    assert eval(python_text(simplified(y.shape[0] // 2)), {str(rows): 6, str(columns): 5}) == 15
    assert evaluated(7, {}) == 7 and env.conditions() == [] and env.only(columns) is None
    assert other == 4 and number > 5
    assert [(evaluated(guard, {rows: 3, columns: 4}), line) for guard, line in env.conditions()] == [
        (True, "here"), (False, "here")]
    assert env.only(columns) == (4, "here") and env.only(rows) is None
    assert size_symbol(env, "x.shape[2]", 1)[1] == 1


def test_views_become_some_of_several_and_outdated():
    base = torch.ones(4, 2, requires_grad=True) * 2
    views = [base.split(2)[1], *(base.as_strided((2, 2), (2, 1), 4) for _ in range(2))]
    assert [is_one_of_several(v) for v in (base, *views)] == [False, True, False, False]
    for view, outdated in zip(views[1:], (False, True), strict=True):
        make_one_of_several(view, outdated)
        assert is_one_of_several(view) and view._version == 0
    assert views[1].sum().item() == 8
    with pytest.raises(RuntimeError, match="does not|do not allow the output views to be modified"):
        views[1].add_(1)
    with pytest.raises(RuntimeError, match="its base or another view of its base has been modified"):
        views[2].sum()


def test_backward_through_a_result_refuses_in_the_words_given():
    value = torch.ones(2)
    with torch.no_grad():
        result = refusing_backward("not here")(value)
    assert result.requires_grad and not result.is_leaf and not result._is_view() and not value.requires_grad
    assert result.data_ptr() == value.data_ptr() and result._version == 0
    with pytest.raises(RuntimeError, match="^not here$"):
        (result * 2).sum().backward()


def test_the_current_node_is_the_one_that_the_engine_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: seen.append(current_autograd_node()))
    y.sum().backward()
    assert current_autograd_node() is None
    assert [node.name() for node in seen] == ["ExpBackward0"]


def test_a_backward_to_some_inputs_reaches_no_other_nodes():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda g: seen.append(backward_reaches(torch.autograd.graph.get_gradient_edge(x).node)))
    y.sum().backward(inputs=[y], retain_graph=True)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    assert seen == [False, None, True]


def test_all_nodes_behind_tensors_edges_and_nodes_are_found_once():
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = x.exp()
    z = y * y + other
    leaf = torch.autograd.graph.get_gradient_edge(x)
    made = ["AddBackward0", "MulBackward0", "ExpBackward0"]
    everything = [node.name() for node in behind([z, y])]
    assert sorted(everything) == sorted(made + 2 * ["torch::autograd::AccumulateGrad"])
    assert [*behind([leaf])] == [leaf.node] and [*behind([y.grad_fn])] == [y.grad_fn, leaf.node]
    assert [*behind([torch.ones(2), None])] == []


def test_the_gradient_of_cumprod_is_another_without_data_where_we_say_so():
    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    grads = []
    for looks in (nullcontext(), Looking()):  # autograd takes what it traces for data that it must not read
        x = torch.linspace(0.5, 1.5, 64).requires_grad_()
        with looks:
            x.cumprod(0).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) != CUMPROD_BY_DATA


def test_what_a_node_saved_is_given_unless_a_hook_packed_it():
    x = torch.ones(2, requires_grad=True)
    given = saved_as_it_is(x.prod().grad_fn, "self")
    assert given is not None and torch.equal(given, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert saved_as_it_is(x.prod().grad_fn, "self") is None
        picked = x[torch.tensor([1])]
    assert is_packed(picked.grad_fn) and not is_packed(x[torch.tensor([1])].grad_fn)
    picked.sum().backward()
    assert not is_packed(picked.grad_fn)


def test_a_node_shows_the_numbers_that_it_saved():
    x = torch.ones(2, 3, requires_grad=True)
    assert saved_numbers(x.logit(eps=0.25).grad_fn, "eps") == (0.25,)
    assert saved_numbers(x.sum((0, 1)).grad_fn, "dim") == (0, 1)
    assert saved_numbers(x.exp().grad_fn, "eps") == (None,)


def test_sequence_numbers_count_the_nodes_that_autograd_makes():
    x = torch.ones(2, requires_grad=True)
    number = sequence_number()
    first, second = x.exp(), x.sin()
    assert node_sequence_number(first.grad_fn) == number and node_sequence_number(second.grad_fn) == number + 1
    assert sequence_number() == number + 2


def test_saved_tensors_are_freed_unless_the_graph_is_kept():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.maybe_clear_saved_tensors()
            return grad * len(ctx.saved_tensors)

    y = Twice.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_without_modes_calls_are_real_and_unseen():
    with Heard() as heard, Seen() as seen, FakeTensorMode():
        calls, ops = heard.calls, len(seen.ops)
        with no_modes():
            x = torch.ones(2, requires_grad=True) * 2
        assert heard.calls == calls and len(seen.ops) == ops
        assert isinstance(torch.ones(2), FakeTensor), "the modes are back"
    assert not isinstance(x, FakeTensor) and not x.requires_grad and x.tolist() == [2.0, 2.0]


def test_what_context_managers_find_on_entry_lies_in_the_known_attributes():
    for manager in (torch.autocast("cpu"), torch.no_grad(), torch.enable_grad(), torch.device("cpu"),
                    torch.inference_mode(), torch.utils._device.DeviceContext("cpu"),
                    torch.autograd.profiler.record_function("x")):  # fmt: skip
        before = dict(getattr(manager, "__dict__", {}))
        with manager:
            now = getattr(manager, "__dict__", {})
            assert {name for name in now if name not in before or now[name] is not before[name]} <= FOUND_ON_ENTRY


def test_a_tensors_hooks_lie_in_the_known_tables():
    backward, accumulated = HOOK_TABLES
    x = torch.ones(1, requires_grad=True)
    assert [getattr(x, name) for name in HOOK_TABLES] == [None, None]
    hooks = [lambda g: None, lambda t: None]
    x.register_hook(hooks[0])
    x.register_post_accumulate_grad_hook(hooks[1])
    assert list(getattr(x, backward).values()) == hooks[:1]
    assert list(getattr(x, accumulated).values()) == hooks[1:]
    for name in HOOK_TABLES:
        setattr(x, name, None)
    x.sum().backward()
    assert x.grad is not None


def test_fake_tensors_take_the_foreach_form_where_real_ones_do():
    """`clip_grad_norm_` chooses as optimizers do: plain tensors at once, others one by one."""

    def one_operator_for_all(make: Callable[[], torch.Tensor]) -> bool:
        parameters = [nn.Parameter(make()) for _ in range(2)]
        for p in parameters:
            p.grad = make()
        with Seen() as seen:
            nn.utils.clip_grad_norm_(parameters, 0.1)
        return any("_foreach_norm" in op.name() for op in seen.ops)

    def fake() -> torch.Tensor:
        return empty_fake(mode, torch.ones(2))

    mode = strict_fake_mode()
    assert one_operator_for_all(lambda: torch.ones(2)) and not one_operator_for_all(fake)
    with patched([(*FOREACH_SUPPORT, has_foreach_support)], lambda: True):
        assert one_operator_for_all(lambda: torch.ones(2)) and one_operator_for_all(fake)


def test_function_modes_are_known_by_three_functions():
    with torch.device("cpu"):
        last, every, count = (getattr(torch.overrides, name)() for name in FUNCTION_MODES)
        assert last is every[-1] and len(every) == count


def test_batch_norm_reads_its_count_as_a_float():
    assert all(issubclass(kind, BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.LazyBatchNorm1d))
    assert "float" in vars(BatchNorm)["forward"].__code__.co_names
    assert nn.BatchNorm2d.forward is BatchNorm.forward


def test_functions_that_read_and_set_settings():
    getters, setters = setting_functions()
    assert len(getters) > 20
    if torch.version.cuda is None or torch.cuda.is_available():  # some of such a build's ask the driver
        assert len([getter() for getter in getters if "fp32" not in getter.__name__]) > 20
    for name in ("set_num_threads", "_set_mkldnn_enabled", "_set_float32_matmul_precision"):
        getter, setter = setters[name]
        setter(getter())
    getter, _ = setters["_set_fp32_precision_setter"]
    assert getter("generic", "all") in ("none", "ieee")
    assert setters["set_flush_denormal"][0] is None


def test_flags_that_torch_keeps_in_python_are_seen_however_they_are_set():
    flags, before = torch.backends.opt_einsum, python_flags()
    assert flags.enabled in before
    flags.enabled = False
    assert python_flags() != before
    del flags.__dict__["enabled"]
    assert python_flags() == before and flags.enabled in (True, False)
    with torch.nn.utils.parametrize.cached():
        assert python_flags() != before
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert python_flags() != before
    assert python_flags() == before


def test_kernels_that_python_registers_are_counted_where_they_take_the_place_of_others() -> None:
    library, before = torch.library.Library("wholestep_tests_counted", "FRAGMENT"), replaced_kernels()
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    assert replaced_kernels() == before
    library.impl("twice", lambda x: x + x, "CPU", allow_override=True)
    assert replaced_kernels() == before + 1
    library.impl("defined_later", lambda x: x, "CPU")
    with pytest.raises(RuntimeError, match="either a name or an OpOverload"):
        library.impl(5, lambda x: x, "CPU")
    assert replaced_kernels() == before + 1


def test_kernels_of_attention_are_seen_to_be_chosen() -> None:
    before = attention_kernels()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernels() == (False, True, False) != before
    assert attention_kernels() == before


def test_hooks_of_all_modules_and_optimizers_are_seen() -> None:
    before = global_hooks()
    modules = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    optimizers = register_optimizer_step_pre_hook(lambda *_: None)
    assert len({*global_hooks()} - {*before}) == 2
    modules.remove()
    optimizers.remove()
    assert global_hooks() == before


def test_a_mode_is_inside_where_it_is_active():
    mode = Seen()
    assert not is_inside(mode)
    with mode:
        assert is_inside(mode) and not is_inside(Seen())


def test_packing_and_padding_call_the_functions_that_tracing_refuses() -> None:
    seen: list[Any] = []

    class Window(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Window():
        nn.utils.rnn.pad_packed_sequence(nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]))
    assert {*PACKED_SEQUENCES} <= {*seen}


def test_a_direct_call_gives_what_the_operator_gives():
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(direct_call(aten.sum.dim_IntList)(x, [1], True), x.sum(1, keepdim=True))
    assert not isinstance(direct_call(aten.sum.dim_IntList), OpOverload)


def test_the_owners_of_a_storage_are_counted():
    x = torch.ones(4)
    storage = x.untyped_storage()
    alone = storage_uses(storage)
    view = x[1:]
    assert storage_uses(storage) == alone + 1
    del view
    assert storage_uses(storage) == alone
    assert alone == 2, "the tensor, and the storage's Python object"


def test_inductor_compiles_a_graph_of_aten_calls():
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return aten.add.Tensor(aten.mul.Tensor(x, y), 1.0), aten.addmm.default(y, x, y)

    mode = FakeTensorMode()
    real = [torch.randn(3, 3), torch.randn(3, 3)]
    fake = [mode.from_tensor(t) for t in real]
    compiled = compile_with_inductor(make_fx(program)(*real), fake, mode)
    given = list(real)
    made = compiled(given)
    assert given == [], "the list is emptied, so that inputs can be freed"
    torch.testing.assert_close(list(made), list(program(*real)))
    kernels = [made for made in inductor_kernels(compiled).values() if isinstance(made, types.BuiltinFunctionType)]
    (kernel,) = (made for made in kernels if made.__name__ == "kernel")
    written = torch.empty(3, 3)
    assert ctypes.CDLL(kernel.__self__.__file__).kernel, "a function of C"
    kernel(*real, written)
    torch.testing.assert_close(written, program(*real)[0])


@pytest.mark.parametrize("reduction", range(3))
def test_the_gradient_of_the_negative_log_likelihood_is_torchs(reduction: int):
    x, target, weight = torch.randn(5, 4).log_softmax(-1), torch.tensor([0, 3, -100, 1, 2]), torch.rand(4)
    for given in (weight, None):
        loss, total = aten.nll_loss_forward.default(x, target, given, reduction, -100)
        rest = torch.rand_like(loss), x, target, given, reduction, -100, total
        expected = aten.nll_loss_backward.default(*rest)
        torch.testing.assert_close(nll_loss_backward(*rest), expected)


def test_a_schema_is_read():
    schema = parse_schema("ours::f(Tensor[] reads, Tensor(a!)[] writes) -> ()")
    assert [argument.name for argument in schema.arguments if argument.alias_info] == ["writes"]


def test_mkls_square_root_is_that_of_torch():
    address, threads = mkl_square_root()
    configuration = torch.__config__.show()
    assert bool(address) == bool(threads) == ("MKL" in configuration and "BLAS_INFO=mkl" in configuration)
    if address:
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
        x, made = torch.rand(1000), torch.empty(1000)
        kernel(1000, x.data_ptr(), made.data_ptr(), 0x2 | 0x100 | 0x140000)
        assert torch.equal(made, torch.sqrt(x))
        local = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(threads)
        before = local(3)
        assert local(before) == 3


def test_the_blas_is_that_of_torchs_products():
    address = matrix_product()
    assert bool(address) or "BLAS_INFO=mkl" not in torch.__config__.show()
    if address:
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(address)
        x, y, made = torch.randn(7, 5), torch.randn(5, 3), torch.empty(7, 3)
        m, n, k = (ctypes.byref(ctypes.c_int(size)) for size in (3, 7, 5))
        as_it_is, one, zero = ctypes.c_char_p(b"n"), *(ctypes.byref(ctypes.c_float(f)) for f in (1, 0))
        kernel(as_it_is, as_it_is, m, n, k, one, y.data_ptr(), m, x.data_ptr(), k, zero, made.data_ptr(), m)
        assert torch.equal(made, x @ y)


def test_tensors_lie_within_pythons_objects_where_c_code_reads_them():
    offsets, functions = tensor_offsets(), tensor_functions()
    assert len(offsets) == 3 and all(functions) and TENSOR_BASE in torch.Tensor.__mro__
    x, dim, sizes = torch.ones(2, 3), ctypes.c_int64(), ctypes.POINTER(ctypes.c_int64)()
    at = [ctypes.c_void_p(id(x) + offsets[0]), ctypes.byref(dim)]
    assert ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2)(functions[0])(*at) == 0 and dim.value == 2
    at[1] = ctypes.byref(sizes)
    assert ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2)(functions[4])(*at) == 0 and sizes[:2] == [2, 3]


def test_versions_and_gradients_are_where_c_code_reads_them():
    x, (at, *_) = torch.nn.Parameter(torch.ones(2, 3)), tensor_offsets()
    wants_gradient, gradient, is_inference, version, count = tensor_functions()[6:]
    tensor, implementation = ctypes.c_void_p(id(x) + at), ctypes.c_void_p.from_address(id(x) + at)
    assert ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(wants_gradient)(implementation)
    assert not ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(is_inference)(tensor)
    read = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(gradient)
    none = read(implementation)[0]
    x.grad = torch.zeros(2, 3)
    assert none != read(implementation)[0] == x.grad._cdata
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(count)(tensor)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(version)(tensor) == x._version == 1


def test_storages_keys_and_offsets_are_where_c_code_reads_them():
    (at, storage, keys), plain = plain_tensor()
    x = torch.ones(4, 3)[1:]
    implementation = ctypes.c_size_t.from_address(id(x) + at).value
    assert ctypes.c_size_t.from_address(implementation + storage).value == x.untyped_storage()._cdata
    assert ctypes.c_uint64.from_address(implementation + keys).value == plain
    assert ctypes.c_uint64.from_address(x._neg_view()._cdata + keys).value != plain
    functions, offset = layout_functions(), ctypes.c_int64()
    assert len(functions) == 5 and all(functions)
    read = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2)(functions[4])
    assert read(ctypes.c_void_p(id(x) + at), ctypes.byref(offset)) == 0 and offset.value == 3


def test_settings_are_where_c_code_reads_them():
    reads = [ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_void_p)(address) for address, _ in setting_addresses()]
    arguments = [argument for _, argument in setting_addresses()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [read(argument) for read, argument in zip(reads, arguments, strict=True)]
    assert len(found) == 12 and found[0] == 0 and found[4] == 1  # gradients, autocast on the CPU


def test_threads_are_those_of_torchs_openmp():
    parallel, number, _, most = openmp()
    assert parallel and number, "chains run on one thread"
    assert ctypes.CFUNCTYPE(ctypes.c_int)(most)() == torch.get_num_threads()


def test_the_precision_of_products_is_what_torch_was_set_to():
    assert full_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not full_precision()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert full_precision()


def test_dispatch_modes_are_seen_on_their_own_thread():
    def elsewhere() -> None:
        found.append(dispatch_modes_active())

    found: list[bool] = []
    assert not dispatch_modes_active() and count_dispatch_modes() == 0
    with Seen():
        assert dispatch_modes_active()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [False] and not dispatch_modes_active()
    with FakeTensorMode():
        assert dispatch_modes_active() and not is_deferring()
    with UnwrappedDispatchMode():
        assert is_deferring()
    assert not is_deferring()


def test_what_c_plus_plus_holds_besides_python() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    before = sys.getrefcount(x)
    assert not held_by_cpp(x) and not held_by_cpp("x")
    y = x * x
    assert held_by_cpp(x) == (sys.getrefcount(x) > before) and not held_by_cpp(y)


def test_the_engine_describes_a_backward_instead_of_running_it():
    made = []

    class Describe(Shape):
        def __init__(self):
            super().__init__()
            made.append(self)

    x = torch.ones(3, requires_grad=True, dtype=torch.float64)
    y = x.sin()
    y.register_hook(lambda grad: grad * 2)
    with engine_compiler(Describe):
        y.sum().backward()
    assert len(made) == 1 and x.grad is None
    y = x.sin()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_the_call_of_the_engine_can_be_exchanged():
    calls = []
    x = torch.ones(3, requires_grad=True)
    with patched([(*BACKWARD_ENGINE, lambda *args, **kwargs: calls.append((args, kwargs)))], lambda: True):
        x.sum().backward()
        torch.autograd.grad((x * 2).sum(), x, materialize_grads=False)
    (first, flags), (second, more) = calls
    assert len(first[0]) == len(first[1]) == 1 and first[2:5] == (False, False, ())
    assert flags == {"allow_unreachable": True, "accumulate_grad": True}
    assert second[4][0] is x and second[5] is False and more == {"accumulate_grad": False}
    assert x.grad is None
    x.sum().backward()
    assert x.grad is not None


def test_gloo_listens_where_it_is_told():
    engine = torch.distributed.ProcessGroupGloo
    made = gloo_options(engine, "127.0.0.1", timedelta(seconds=7))
    assert made._timeout == timedelta(seconds=7)
    assert len(made._devices) == 1
    alone = engine(torch.distributed.HashStore(), 0, 1, made)
    x = torch.ones(2)
    alone.allreduce([x]).wait()
    assert x.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError):
        gloo_options(engine, "no.such.host.invalid", timedelta(seconds=7))


def test_a_storage_is_identified_even_without_memory():
    x, y = torch.zeros(4), torch.zeros(4)
    view = x[1:]
    x.untyped_storage().resize_(0)
    y.untyped_storage().resize_(0)
    assert storage_id(x.untyped_storage()) == storage_id(view.untyped_storage())
    assert storage_id(x.untyped_storage()) != storage_id(y.untyped_storage())
    assert has_storage(x) and not has_storage(torch.eye(2).to_sparse())


def test_a_function_mode_sees_what_is_read_of_a_tensor():
    read = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            read.append((func == GET_VERSION, func == GET_BASE, func == IS_VIEW))
            return func(*args, **(kwargs or {}))

    x = torch.zeros(3).add_(1)
    with Mode():
        version, base, is_view = x._version, x._base, x._is_view()
    assert (version, base, is_view) == (1, None, False)
    assert read == [(True, False, False), (False, True, False), (False, False, True)]


def test_distributions_check_by_one_function():
    asked = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True)
        made, _ = asked.count(IS_ALL_TRUE), normal.log_prob(torch.zeros(2))
    assert made == 2 and asked.count(IS_ALL_TRUE) == 3


def test_a_strict_fake_tensor_gives_no_address():
    fake = empty_fake(strict_fake_mode(), torch.ones(3))
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        fake.data_ptr()


def test_a_generator_is_known_by_its_c_object() -> None:
    ours, met = torch.Generator(), []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(kwargs["generator"])
            return func(*args, **kwargs)

    with See():
        torch.randn(2, generator=ours)
    assert generator_id(met[0]) == generator_id(ours) != generator_id(torch.default_generator)


def test_settings_by_which_kernels_are_chosen() -> None:
    assert kernel_settings()[0] == torch.get_num_threads()
    before = kernel_settings()
    with torch.backends.mkldnn.flags(enabled=False):
        assert kernel_settings() != before or not torch.backends.mkldnn.is_available()
    assert kernel_settings() == before


def test_a_mode_can_refuse_to_give_addresses() -> None:
    mode = FakeTensorMode()
    with mode:
        fake = torch.ones(3)
    assert fake.data_ptr() == 0
    refuse_addresses(mode)
    with mode:
        fake = torch.ones(3)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        fake.data_ptr()


@pytest.mark.parametrize(
    "shapes", [((16, 8), (3, 13, 8)), ((3, 4, 8), (16, 8)), ((4, 16), (8, 16)), ((3, 7, 8), (3, 13, 8))]
)
def test_grouped_products_lie_as_their_kernel_leaves_them(shapes: Any) -> None:
    """The second operand is given transposed, as a `Linear` has it; torch's own rule knows bfloat16 alone."""

    def place(mode: Any) -> Any:
        with mode:
            one, two, ends = torch.ones(shapes[0]), torch.ones(shapes[1]), torch.tensor([2, 5, 16], dtype=torch.int32)
            out = torch.ops.aten._grouped_mm(one, two.mT, None if one.dim() == two.dim() == 3 else ends)
            return out.shape, out.stride(), out.dtype

    assert place(strict_fake_mode()) == place(nullcontext())
    with pytest.raises(RuntimeError, match="BF16"):
        place(FakeTensorMode(allow_non_fake_inputs=True))


def test_dynamo_puts_checkpoints_under_the_operators_we_know():
    seen = []

    def contexts():
        return nullcontext(), nullcontext()

    def backend(gm, inputs):
        (node,) = [n for n in gm.graph.nodes if type(n.target) in CHECKPOINT_OPERATORS]
        body = getattr(gm, node.args[0].target)
        seen.append((checkpoint_contexts(body), node.kwargs["preserve_rng_state"]))
        return gm

    options = {"use_reentrant": False, "preserve_rng_state": False}
    for more, kept in (({}, {}), ({"context_fn": contexts}, {"context_fn": contexts})):
        torch._dynamo.reset()
        fn = torch.compile(lambda x, more=more: checkpoint(torch.sin, x, **options, **more), backend=backend)
        fn(torch.ones(2, requires_grad=True))
        assert seen.pop() == (kept, False)
    assert all("__call__" in vars(operator) for operator in CHECKPOINT_OPERATORS)


@pytest.mark.skipif(not hasattr(*COMPILED_OPERATORS), reason="absent from this version of torch")
def test_dynamo_runs_higher_order_operators_where_we_know() -> None:
    owner, name = COMPILED_OPERATORS
    with patched([(owner, name, lambda *args: "seen")], lambda: True):
        assert torch.cond(torch.tensor(True), lambda x: x, lambda x: -x, (torch.ones(2),)) == "seen"
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)


def test_cross_entropy_is_called_where_we_know() -> None:
    x, y, weights = torch.ones(2, 3), torch.tensor([0, 1]), torch.ones(3)
    with patched([(*CROSS_ENTROPY, lambda *args: args)], lambda: True):
        found: Any = nn.functional.cross_entropy(x, y, weights, ignore_index=7, label_smoothing=0.5)
    assert found[0] is x and found[1] is y and found[2] is weights and found[4:] == (7, 0.5)


def test_cpp_describes_arguments_that_fit_no_overload_where_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def describe(tensor: torch.Tensor) -> str:
        asked.append(sys._getframe(1).f_globals["__name__"])
        return object.__repr__(tensor)

    monkeypatch.setattr(torch.Tensor, "__repr__", describe)
    with FakeTensorMode():
        x, state = torch.ones(2, 3, 4), torch.ones(3)
        with pytest.raises(TypeError, match="_select_batch_norm_backend"):  # by its rule, which takes no None
            aten._batch_norm_with_update(x, None, None, state, state, 0.1, 1e-5)
        with pytest.raises(RuntimeError, match="failed to match any schema"):
            aten.geometric(x, state)
    assert set(asked) == set(DESCRIBING_MODULES)


def test_calls_are_dispatched_where_cpp_has_switched_that_off() -> None:
    seen: list[tuple[bool, bool]] = []

    class Reads(TorchDispatchMode):
        called = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called = True
            return func(*args, **(kwargs or {}))

    class Index(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") != "__index__":
                return func(*args, **(kwargs or {}))
            mode.called = False
            func(*args)
            without = mode.called
            with dispatching():
                found = func(*args)
            seen.append((without, mode.called))
            return found

    with Reads() as mode, Index():
        assert torch.LongTensor([torch.tensor(3)]).tolist() == [3]
    assert seen == [(False, True)]


def test_function_modes_are_off_inside_of_no_modes_alone():
    assert not function_modes_off()
    with no_modes():
        assert function_modes_off()
    storage = torch.ones(2).untyped_storage()
    assert address_of(storage) == storage.data_ptr()


def test_modes_are_counted_and_kept_away():
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {})) * 2

    assert function_modes() == 0
    with Counting() as mode:
        assert function_modes() == 1
        torch.ones(2)
        with function_modes_disabled():
            torch.ones(2)
            with function_modes_enabled():
                torch.ones(2)
    assert mode.calls == 2
    with Doubling():
        assert torch.ones(()).item() != 1
        with dispatch_modes_off():
            assert torch.ones(()).item() == 1


def test_dynamo_skips_the_methods_of_a_class() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Twice:
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return inner(x) * 2

    seen: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        seen.append(gm)
        return gm

    torch.compile(Twice().run, backend=backend)(torch.ones(2))
    assert len(seen) == 1
    torch._dynamo.reset()
    skipped = skipped_by_dynamo(Twice)
    assert torch.equal(torch.compile(skipped().run, backend=backend)(torch.ones(2)), torch.full((2,), 4.0))
    assert len(seen) == 1


def test_what_torch_compile_gave_runs_as_it_is_written():
    seen: list[Any] = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda gm, _: seen.append(gm) or gm, fullgraph=True)
    with patched(nested_compiles(), lambda: True):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and not seen
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and len(seen) == 1


def test_a_dispatch_mode_that_is_called_as_it_is():
    class Counts(UnwrappedDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counts.calls += 1
            return func(*args, **(kwargs or {}))

    with Counts():
        torch.ones(2) + 1
    assert Counts.calls == 2 and not hasattr(Counts.__torch_dispatch__, "__wrapped__")
    assert hasattr(type("Wrapped", (TorchDispatchMode,), dict(vars(Counts))).__torch_dispatch__, "__wrapped__")


def test_collectives_as_operators(tmp_path):
    found = {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if "all_gather_into_tensor" in name}
    assert found <= set(COLLECTIVE_NAMESPACES) and "_c10d_functional" in found
    assert torch.ops.c10d.allreduce_.default.namespace == COLLECTIVE_NAMESPACES[0]
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        begun = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)
        assert wait_collective(begun) is begun and begun.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_a_call_at_the_end_of_a_backward_comes_after_all_gradients():
    seen, weight = [], torch.ones(2, requires_grad=True)
    scaled = weight * 3
    scaled.register_hook(lambda grad: at_end_of_backward(lambda: seen.append(weight.grad.tolist())))
    scaled.sum().backward()
    assert seen == [[3.0, 3.0]]


def test_recurrent_modules_look_up_their_weights_again():
    lstm = nn.LSTM(2, 3)
    lstm.__dict__["weight_ih_l0"] = torch.ones(12, 2)
    refresh_flat_weights(lstm)
    assert lstm(torch.ones(1, 2))[0].shape == (1, 3) and lstm._flat_weights[0] is lstm.__dict__["weight_ih_l0"]


def test_innermost_saved_tensor_hooks():
    assert innermost_saved_tensor_hooks() is None
    pair = (lambda one: one), (lambda one: one)
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        assert innermost_saved_tensor_hooks() == pair and others_pack_saved_tensors()
        with torch.autograd.graph.save_on_cpu():
            assert not others_pack_saved_tensors()


def test_subclasses_are_taken_for_plain_tensors():
    seen = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            with plain_subclasses():
                plain = torch.neg(args[0])
            return plain, plain_torch_function(func, types, args, kwargs or {})

    tensor = torch.ones(2)
    tensor.__class__ = Seeing  # the object itself
    assert [type(one) for one in torch.abs(tensor)] == [torch.Tensor] * 2 and seen == [torch.abs]
    infinite = torch.tensor([1.0, float("inf")])
    found = torch.zeros(1)
    UNSCALE_GRADIENTS([infinite], found, torch.ones(1))
    assert found.item() == 1


def test_zeros_without_memory_are_told_from_others():
    assert is_zero_tensor(torch._efficientzerotensor((2,))) and not is_zero_tensor(torch.zeros(2))


def test_trees_keep_the_kinds_of_their_branches() -> None:
    Pair = namedtuple("Pair", "a b")
    tree = Pair([1], {"x": (2, "y")})
    assert tree_map(str, tree) == Pair(["1"], {"x": ("2", "y")})
    assert tree_map_only(int, lambda n: n + 1, tree) == Pair([2], {"x": (3, "y")})
    assert tree_map(type, [tree], is_leaf=lambda value: isinstance(value, Pair)) == [Pair]


@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop", "Adafactor", "ASGD", "RAdam", "NAdam", "Adamax", "Rprop"])
def test_optimizers_make_the_state_of_a_group_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Dynamo's import has wrapped the method."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.full((2, 3), 5.0)
    wrapped = getattr(torch.optim, kind)
    monkeypatch.setattr(wrapped, "_init_group", functools.wraps(wrapped._init_group)(lambda *args: None))
    optimizer: torch.optim.Optimizer = wrapped([parameter], lr=0.1)
    make_optimizer_state(optimizer, optimizer.param_groups[0])
    made = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    monkeypatch.undo()
    optimizer.step()
    assert made.keys() == optimizer.state[parameter].keys() and bool(made) is (kind != "SGD")
    assert all(len(value.unique()) == 1 and 5.0 not in value for value in made.values())


def test_functions_that_update_a_list_one_by_one_are_where_their_optimizers_find_them():
    found = {name for module, name in SINGLE_TENSOR_UPDATES if callable(getattr(module, name, None))}
    assert {"_single_tensor_adadelta", "_single_tensor_adafactor", "_single_tensor_adam", "_single_tensor_sgd"} <= found


def test_what_is_saved_is_given_to_no_hooks_from_outside():
    x = torch.ones((), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        with without_saved_tensor_hooks():
            assert innermost_saved_tensor_hooks() is None
            x.square().backward()
        assert innermost_saved_tensor_hooks() is not None
        assert x.grad.item() == 2


def test_attributes_of_fakes():
    with FakeTensorMode():
        fake = torch.empty(2)
    assert all(map(is_fakes_own, vars(fake))) and is_fakes_own("wholestep_ref") and not is_fakes_own("tag")


def test_floats_that_dynamo_hands_on_as_tensors() -> None:
    seen = []

    def backend(gm: Any, inputs: Any) -> Any:
        places = floats_as_tensors(gm.graph)
        seen.extend(given.item() for k, given in enumerate(inputs) if k in places)
        return gm

    torch._dynamo.reset()
    torch.compile(lambda x, rate: x * rate, backend=backend, dynamic=True)(torch.ones(3, dtype=torch.float64), 0.25)
    assert seen == [0.25]


def test_what_linearize_calls() -> None:
    seen = []
    torch.func.linearize(lambda x: (seen.append(is_linearized()), x.sin())[1], torch.ones(2))
    assert seen and all(seen) and not is_linearized()
