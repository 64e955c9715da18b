"""Overrides: other modules in the trace, and the last word on the graph; `gm_transformation` likewise."""

import copy
from operator import getitem

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.errors import GraphError

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
        self.again = [self.middle]  # the same module, where no registry knows it

    def forward(self, x):
        return self.last(self.again[0](self.middle(self.first(x))))


class Scaled(nn.Module):
    """Runs what it replaces, and has a parameter, a buffer and a norm of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale, self.norm = inner, nn.Parameter(torch.ones(6) * 2), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.inner(x) * self.scale)


class ByName(ws.Override):
    def __init__(self, name, make):
        self.name, self.make, self.asked, self.made = name, make, [], []

    def replacement(self, fqn, module):
        self.asked.append(fqn)
        if fqn == self.name:
            self.made.append(self.make(module))
            return self.made[-1]
        return module


class ByType(ws.Override):
    def replacement(self, fqn, module):
        return nn.ReLU() if isinstance(module, nn.Tanh) else module


def train(model, opt, x):
    loss = model(x).square().sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def swapped(model, name, make):
    """The model with the module really exchanged, wherever it is."""
    old = model.get_submodule(name)
    new = make(old)
    model.set_submodule(name, new)
    model.again = [new if held is old else held for held in model.again]
    return model


def structure(model):
    return {name: id(module) for name, module in model.named_modules()} | {"again": id(model.again[0])}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("middle", Scaled),
        ("middle.1", lambda old: nn.ReLU()),
        ("last", lambda old: nn.Sequential(nn.Dropout(0.3), old)),
    ],
)
def test_as_if_the_module_were_exchanged_and_it_is_not(name, make):
    model = Net()
    real = swapped(copy.deepcopy(model), name, make)
    override = ByName(name, make)
    step, before = ws.compile(train, module_override=[override], fullgraph=True), structure(model)
    theirs = [p for n, p in real.named_parameters() if "scale" not in n and "norm" not in n]
    opt, real_opt = (torch.optim.SGD(p, lr=0.01, momentum=0.9) for p in (model.parameters(), theirs))
    for seed in range(3):
        losses = []
        for fn, net, optimizer in ((step, model, opt), (train, real, real_opt)):
            torch.manual_seed(seed)
            losses.append(fn(net, optimizer, torch.randn(4, 6)))
        assert torch.equal(*losses)
        assert structure(model) == before
    assert override.asked.count(name) == len(override.made) == 1
    assert all(map(torch.equal, model.parameters(), theirs))
    kept, exchanged = override.made[0].state_dict(), real.get_submodule(name).state_dict()
    assert all(torch.equal(kept[key], exchanged[key]) for key in exchanged)


def test_modules_inside_of_a_replaced_one_that_still_runs_and_the_outermost():
    model = Net()
    real = swapped(swapped(copy.deepcopy(model), "middle.1", lambda old: nn.ReLU()), "middle", Scaled)
    x = torch.randn(4, 6)
    overrides = [ByName("middle", Scaled), ByType()]
    step = ws.compile(lambda model, x: model(x).exp(), module_override=overrides, fullgraph=True)
    assert torch.equal(step(model, x), real(x).exp())
    outer = [ByName("", lambda old: nn.Linear(6, 2))]
    outermost = ws.compile(copy.deepcopy(model), module_override=outer, fullgraph=True)
    assert outermost(x).shape == (4, 2)


def test_a_replacement_is_in_training_when_the_module_is():
    model, override = nn.Sequential(nn.Linear(6, 6)), ByName("0", lambda old: nn.Dropout(0.5))
    step = ws.compile(lambda model, x: model(x), module_override=[override], fullgraph=True)
    x = torch.ones(50)
    for training in (True, False, True, False):
        model.train(training)
        assert torch.equal(step(model, x), x) is not training
        assert override.made[0].training and len(override.made) == 1  # as its maker left it
    assert len(step.recompiles) == 1

    def trains(model, x):
        model.train()
        return model(x)

    assert not torch.equal(ws.compile(trains, module_override=[override], fullgraph=True)(model, x), x)
    assert model.training and model[0].training


def test_the_modules_are_back_when_capture_fails():
    model = Net()
    before = structure(model)

    def fails(model, x):
        return 1 if model(x).sum() > 0 else 0

    with pytest.raises(ws.errors.DataDependentError):
        ws.compile(fails, module_override=[ByType()], fullgraph=True)(model, torch.randn(4, 6))
    assert structure(model) == before


def test_another_model_of_the_same_structure_has_replacements_of_its_own():
    step = ws.compile(lambda model, x: model(x), module_override=[ByName("middle", Scaled)], fullgraph=True)
    x = torch.randn(4, 6)
    for model in (Net(), Net()):
        assert torch.equal(step(model, x), swapped(copy.deepcopy(model), "middle", Scaled)(x))


def test_two_overrides_of_one_module_and_other_mistakes():
    model, x = Net(), torch.randn(4, 6)
    before = structure(model)
    both = [ByName("middle.1", lambda old: nn.ReLU()), ByType()]
    with pytest.raises(ValueError, match=r"ByName and ByType both replace middle.1 \(Tanh\)"):
        ws.compile(lambda m, x: m(x), module_override=both, fullgraph=True)(model, x)
    with pytest.raises(TypeError, match=r"ByName.replacement gives a NoneType for last \(Linear\)"):
        ws.compile(lambda m, x: m(x), module_override=[ByName("last", lambda old: None)], fullgraph=True)(model, x)
    with pytest.raises(TypeError, match="instances of ws.Override are required, found <class"):
        ws.compile(lambda m, x: m(x), module_override=[ByType], fullgraph=True)
    assert structure(model) == before


# Transformations --------------------------------------------------------------------------------------------------


class Looks(ws.Override):
    def __init__(self):
        self.seen = []

    def transform(self, gm, flat_state):
        nodes = gm.graph.find_nodes(op="placeholder")
        state = [value.clone() for value, node in zip(flat_state, nodes, strict=False) if "state" in node.name]
        self.seen.append((nodes, flat_state, state))
        return gm


def test_the_flat_state_is_what_the_placeholders_get():
    model, looks = Net(), Looks()
    opt = torch.optim.Adam(model.parameters(), lr=0.5)
    step = ws.compile(train, module_override=[looks], gm_transformation=lambda gm: gm, fullgraph=True)
    x = torch.randn(4, 6)
    for _ in range(3):
        step(model, opt, x)
    ((nodes, flat, state),) = looks.seen
    assert [getattr(v, "shape", ()) for v in flat] == [getattr(n.meta["val"], "shape", ()) for n in nodes]
    given = {id(value) for value in flat}
    assert {id(x), *map(id, model.parameters())} <= given and 0.5 in [v for v in flat if isinstance(v, float)]
    assert len(state) == 3 * len(opt.param_groups[0]["params"]) and not any(s.any() for s in state)


ADDED = {
    "an operator": lambda graph, node: graph.call_function(aten.mul.Tensor, (node, 3.0)),
    "a function": lambda graph, node: graph.call_function(torch.add, (node, node), {"alpha": 2}),
    "a composite": lambda graph, node: graph.call_function(nn.functional.normalize, (node,), {"dim": 1}),
    "a method": lambda graph, node: graph.call_method("clamp", (node, -0.5), {"max": 0.5}),
    "one of several": lambda graph, node: graph.call_function(getitem, (graph.call_function(torch.topk, (node, 6)), 0)),
}
SAME = {
    "an operator": lambda y: y * 3.0,
    "a function": lambda y: torch.add(y, y, alpha=2),
    "a composite": lambda y: nn.functional.normalize(y, dim=1),
    "a method": lambda y: y.clamp(-0.5, max=0.5),
    "one of several": lambda y: y.topk(6)[0],
}


def after_the_first_layer(add):
    def transform(gm):
        node = next(node for node in gm.graph.nodes if node.target is aten.addmm.default)
        with gm.graph.inserting_after(node):
            anchor = gm.graph.call_function(aten.alias.default, (node,))
        node.replace_all_uses_with(anchor, lambda user: user is not anchor)
        with gm.graph.inserting_before(anchor):
            new = add(gm.graph, node)
        anchor.replace_all_uses_with(new)
        gm.graph.erase_node(anchor)
        return gm

    return transform


@pytest.mark.parametrize("what", SAME)
def test_what_a_transformation_may_add(what):
    model, x = Net(), torch.randn(4, 6)
    step = ws.compile(lambda model, x: model(x), gm_transformation=after_the_first_layer(ADDED[what]), fullgraph=True)
    with torch.no_grad():
        middle = model.middle
        right = model.last(middle(middle(SAME[what](model.first(x)))))
        assert torch.equal(step(model, x), right)
    assert "gm_transformation" in {n.meta["info"].where for n in step.graphs[0].graph.nodes if "info" in n.meta}


def test_a_transformation_that_gives_nothing_or_what_cannot_run():
    model, x = Net(), torch.randn(4, 6)

    def run(transform):
        with torch.no_grad():
            ws.compile(lambda model, x: model(x), gm_transformation=transform, fullgraph=True)(model, x)

    with pytest.raises(TypeError, match="gm_transformation gives a NoneType; the torch.fx.GraphModule to run"):
        run(lambda gm: None)
    with pytest.raises(GraphError, match="gm_transformation adds %.*matmul.*which fails"):
        run(after_the_first_layer(lambda graph, node: graph.call_function(torch.matmul, (node, node))))
    with pytest.raises(GraphError, match=r"aten.mul_.Tensor writes to an argument"):
        run(after_the_first_layer(lambda graph, node: graph.call_function(torch.Tensor.mul_, (node, 2))))
