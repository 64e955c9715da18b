"""The first seed's tests, written anew.

| seed (DistributedPatternTests) | here |
|---|---|
| test_intermediate_hook_with_closure | test_a_hook_reads_its_closure_at_run_time |
| test_module_backward_hooks_eager, _aot, _inductor | test_module_hooks |
| test_module_backward_hooks_multi_layers | test_module_hooks_in_several_layers |
| test_storage_resize_zero_cpu (and _gpu) | test_memory_given_back |
| test_storage_resize_nonzero_cpu (and _gpu) | test_memory_taken_anew |
| test_unsafe_set_version_counter1, 2 | test_a_version_counter_is_read_and_set, test_a_version_counter_is_kept |
| test_unsafe_preserve_version_counter1, 2 | test_a_version_counter_is_preserved, test_a_version_counter_is_kept |
| test_nn_param_return1 to 4 | test_a_parameter_made_inside_is_returned |
| test_fake_distributed_aot_eager, _inductor | test_a_module_sharded_by_its_hooks |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.autograd import compiled_backward
from wholestep.errors import CaptureError, UnsupportedError
from wholestep.testing import CompileCounter

WHOLE = functools.partial(ws.compile, fullgraph=True)


def module_with_backward_hooks():
    def before(module, grad_output):
        assert module.weight.size() == (10, 10)
        module.hook_count_pre.add_(1)
        return (torch.sin(grad_output[0] + 1.2),)

    def after(module, grad_input, grad_output):
        assert module.weight.size() == (10, 10)
        module.hook_count_post.add_(1)
        return (torch.sin(grad_input[0] + 3.4),)

    torch.manual_seed(1234)
    module = nn.Linear(10, 10)
    module.hook_count_pre, module.hook_count_post = torch.tensor(0), torch.tensor(0)
    module.register_full_backward_pre_hook(before)
    module.register_full_backward_hook(after)
    return module, torch.rand(2, 10, requires_grad=True)


def steps(module, inputs):
    for _ in range(4):
        out = module(inputs)
        out.sum().backward()
    return out


def assert_same(*pairs):
    for left, right in pairs:
        assert type(left) is type(right) and torch.equal(left, right)
        assert left.requires_grad == right.requires_grad
        if left.is_leaf and left.requires_grad:
            assert torch.equal(left.grad, right.grad)


def module_pairs(one, two):
    names = ("hook_count_pre", "hook_count_post", "weight", "bias")
    return [(getattr(one, name), getattr(two, name)) for name in names]


@dataclass
class Held:
    value: torch.Tensor


@pytest.mark.parametrize("forward", [lambda f: f, WHOLE], ids=["eager", "compiled"])
def test_a_hook_reads_its_closure_at_run_time(forward):
    def fn(x, held):
        y = x.sin()
        closure_var = y + 1
        y.register_hook(lambda grad: grad + held.value + closure_var)
        return y.sin()

    objects = [Held(torch.tensor(88)), Held(torch.tensor(99))]
    inputs = [torch.ones(4, requires_grad=True) for _ in range(4)]
    for x, held in zip(inputs[:2], objects, strict=True):
        fn(x, held).sum().backward()
    ours = forward(fn)
    with compiled_backward(CompileCounter()) as context:
        for x, held in zip(inputs[2:], objects, strict=True):
            ours(x, held).sum().backward()
    assert context.eager == {} and context.captures == 1
    assert torch.equal(inputs[0].grad, inputs[2].grad)
    assert torch.equal(inputs[1].grad, inputs[3].grad)


@pytest.mark.parametrize("forward", ["eager", "aten", "counter"])
@pytest.mark.parametrize("backward", ["aten", "user", "none"])
def test_module_hooks(forward, backward):
    one, first = module_with_backward_hooks()
    out = steps(one, first)
    two, second = module_with_backward_hooks()
    count, back = CompileCounter(), CompileCounter()
    backend = count if forward == "counter" else "aten"
    ours = two if forward == "eager" else ws.compile(two, backend=backend, fullgraph=True)
    if backward == "none":
        result = steps(ours, second)
    else:
        with compiled_backward(back if backward == "user" else "aten") as context:
            result = steps(ours, second)
        assert context.eager == {}
    assert_same(*module_pairs(one, two), (first, second), (out, result))
    assert count.frame_count == (2 if forward == "counter" else 0)  # a forward and its backward
    if backward == "user":
        assert back.frame_count == 2  # gradients that are None, and that are there


@pytest.mark.parametrize("forward", [lambda m: m, WHOLE], ids=["eager", "compiled"])
def test_module_hooks_in_several_layers(forward):
    (a, first), (b, _) = module_with_backward_hooks(), module_with_backward_hooks()
    out = steps(nn.Sequential(a, b), first)
    (c, second), (d, _) = module_with_backward_hooks(), module_with_backward_hooks()
    with compiled_backward() as context:
        result = steps(forward(nn.Sequential(c, d)), second)
    assert context.eager == {}
    assert_same(*module_pairs(a, c), *module_pairs(b, d), (first, second), (out, result))


def test_hooks_of_a_compiled_forward_write_when_the_backward_runs():
    module, x = module_with_backward_hooks()
    compiled = ws.compile(nn.Sequential(module), fullgraph=True)
    first, second = compiled(x).sum(), compiled(x).sum()
    assert module.hook_count_pre == 0
    first.backward()
    assert module.hook_count_pre == module.hook_count_post == 1
    second.backward()
    assert module.hook_count_pre == module.hook_count_post == 2


def test_hooks_of_a_compiled_forward_change_no_other_objects():
    model = nn.Linear(3, 3)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: setattr(module, "seen", grad_output[0]))
    with pytest.raises(UnsupportedError, match=r"a hook that runs in the backward of a compiled function changes"):
        ws.compile(nn.Sequential(model), fullgraph=True)(torch.randn(2, 3, requires_grad=True))
    assert not hasattr(model, "seen")


def test_hooks_of_the_compiled_module_itself_stay_outside():
    model = nn.Linear(3, 3)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: setattr(module, "seen", grad_output[0]))
    compiled = ws.compile(model, fullgraph=True)
    for scale in (1.0, 2.0):
        (compiled(torch.randn(2, 3, requires_grad=True)) * scale).sum().backward()
        assert torch.equal(model.seen, torch.full((2, 3), scale))
    assert compiled.recompiles == ["L['self']: expected missing key 'seen', found it"]
    assert len(compiled.graphs) == 1


@torch.no_grad()
def test_memory_given_back():
    def fn(x):
        y = torch.sin(x)
        x.untyped_storage().resize_(0)
        return torch.cos(y)

    compiled = ws.compile(fn, fullgraph=True)
    for _ in range(2):
        x = torch.randn(10)
        expected = torch.cos(torch.sin(x))
        assert torch.equal(compiled(x), expected)
        assert x.untyped_storage().size() == 0
    assert compiled.recompiles == []


@torch.no_grad()
def test_memory_taken_anew():
    def fn(x, out):
        y = torch.sin(x)
        assert out.untyped_storage().size() == 0
        out.untyped_storage().resize_(x.untyped_storage().size())
        out.copy_(y.cos())

    compiled = ws.compile(fn, fullgraph=True)
    for _ in range(2):
        x, out = torch.randn(10), torch.randn(10)
        out.untyped_storage().resize_(0)
        compiled(x, out)
        assert out.untyped_storage().size() == x.untyped_storage().size()
        assert torch.equal(out, torch.cos(torch.sin(x)))
    assert compiled.recompiles == []


@torch.no_grad()
def test_memory_of_another_size_is_a_reason_to_capture_again():
    compiled = ws.compile(lambda x, y: y.add(x.untyped_storage().size()), fullgraph=True)
    x, y = torch.zeros(3), torch.zeros(())
    assert compiled(x, y) == 12
    x.untyped_storage().resize_(16)
    assert compiled(x, y) == 16
    assert compiled.recompiles == ["L['x'] bytes of memory: expected 12, found 16"]


def test_memory_is_as_before_when_a_capture_fails():
    def fn(x):
        x.untyped_storage().resize_(0)
        raise KeyError("mine")

    x = torch.ones(3)
    with pytest.raises(KeyError):
        ws.compile(fn, fullgraph=True)(x)
    assert x.untyped_storage().size() == 12 and x.sum() == 3


def sharded_module():
    """A module whose weight is whole only while it is used: a hand-made form of full sharding on two ranks."""

    @torch.no_grad
    def all_gather(t):
        return torch.cat([t, t], 0)

    @torch.no_grad
    def reduce_scatter(t):
        return t.narrow(0, 0, t.size(0) // 2).clone()

    def gather(module, *_):
        whole = module.unsharded_weight
        whole.untyped_storage().resize_(whole.nelement() * whole.element_size())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
            whole.copy_(all_gather(module.sharded_weight))
        module.weight = whole

    def release(module, *_):
        module.weight = module.sharded_weight
        module.unsharded_weight.untyped_storage().resize_(0)

    def reduce(module, *_):
        new = reduce_scatter(module.weight.grad)
        module.weight = module.sharded_weight
        module.weight.grad = new
        module.unsharded_weight.untyped_storage().resize_(0)

    torch.manual_seed(1234)
    module = nn.Linear(20, 10, bias=False)
    module.sharded_weight = nn.Parameter(reduce_scatter(module.weight))
    module.unsharded_weight = nn.Parameter(all_gather(module.sharded_weight))
    module.unsharded_weight.untyped_storage().resize_(0)
    del module.weight
    module.register_full_backward_pre_hook(gather)
    module.register_full_backward_hook(reduce)
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    return module, torch.rand(2, 20, requires_grad=True)


@pytest.mark.parametrize("forward", [lambda m: m, WHOLE], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["aten", "user"])
def test_a_module_sharded_by_its_hooks(forward, backend):
    one, first = sharded_module()
    out = steps(one, first)
    two, second = sharded_module()
    count = CompileCounter()
    with compiled_backward(count if backend == "user" else "aten") as context:
        result = steps(forward(two), second)
    assert context.eager == {}
    assert_same((one.weight, two.weight), (first, second), (out, result))
    assert count.frame_count == (2 if backend == "user" else 0)
    assert two.unsharded_weight.untyped_storage().size() == 0
    assert two.unsharded_weight._version == one.unsharded_weight._version


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("computed", [True, False])
def test_a_parameter_made_inside_is_returned(requires_grad, computed):
    def fn(x):
        parameter = nn.Parameter(x + 123 if computed else x, requires_grad=requires_grad)
        return parameter, parameter.sin()

    compiled = ws.compile(fn, fullgraph=True)
    one = torch.randn(16)
    two = one.clone()
    (p, r), (q, s) = fn(one), compiled(two)
    if requires_grad:
        r.sum().backward()
        s.sum().backward()
    assert_same((r, s), (p, q))


def test_a_result_beside_its_detached_argument_can_be_differentiated():
    x = torch.randn(4, requires_grad=True)
    same, r = ws.compile(lambda x: (x.detach(), x.sin()), fullgraph=True)(x)
    r.sum().backward()
    assert torch.equal(x.grad, x.detach().cos()) and same.data_ptr() == x.data_ptr()


@torch.no_grad()
def test_a_version_counter_is_read_and_set():
    count = CompileCounter()

    @ws.compile(backend=count, fullgraph=True)
    def fn(w, x):
        x = x.sin()
        v = w._version
        w.copy_(x + 1)
        assert w._version == v + 1
        torch._C._autograd._unsafe_set_version_counter((w,), (v,))
        return w, v, v + 10

    for v in (3, 0, 1):
        w = torch.randn(16)
        for i in range(v):
            w.fill_(i)
        x = torch.randn(16)
        same, before, later = fn(w, x)
        assert same is w and torch.equal(w, x.sin() + 1)
        assert (before, later, w._version) == (v, v + 10, v)
    assert count.frame_count == 1


@torch.no_grad()
def test_a_version_counter_is_preserved():
    def fn(w, x):
        with torch.autograd._unsafe_preserve_version_counter(w):
            w.copy_(x.sin() + 1)
        return w

    w, x = torch.randn(16).fill_(0).fill_(1), torch.randn(16)
    assert ws.compile(fn, fullgraph=True)(w, x) is w
    assert w._version == 2 and torch.equal(w, x.sin() + 1)


@pytest.mark.parametrize("preserve", [False, True])
def test_a_version_counter_is_kept(preserve):
    def fn(w, x):
        r = w.sin()
        with torch.no_grad():
            if preserve:
                with torch.autograd._unsafe_preserve_version_counter(w):
                    w.copy_(x)
            else:
                v = w._version
                w.copy_(x)
                torch._C._autograd._unsafe_set_version_counter((w,), (v,))
        return r

    results = []
    for function in (fn, ws.compile(fn, fullgraph=True)):
        torch.manual_seed(0)
        w, x = torch.randn(1, requires_grad=True), torch.randn(1)
        r = function(w, x)
        r.backward()
        results.append((r, w, w.grad))
        assert torch.equal(w, x) and torch.equal(w.grad, x.cos()) and w._version == 0
    assert_same(*zip(*results, strict=True))


@torch.no_grad()
def test_a_branch_on_a_version_counter_is_refused():
    x = torch.zeros(3)
    with pytest.raises(CaptureError, match="Python compares a version counter"):
        ws.compile(lambda x: x + 1 if x._version > 2 else x - 1, fullgraph=True)(x)
