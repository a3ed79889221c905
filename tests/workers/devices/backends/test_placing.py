"""Moves, on tensors of the CPU and of the meta device, which like XLA replaces every parameter."""

from collections import OrderedDict

import torch
from torch import nn

from workers.devices.backends.device_transfer import (
    map_tensors,
    move_module,
    move_to_device,
    rebind_optimizer,
    tensors_of,
)

META = torch.device("meta")


def test_a_parameter_shared_by_three_modules_is_one_after_the_move():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = c.weight = a.weight
    model = nn.ModuleList([a, b, c, a])
    move_module(model, META)
    assert a.weight is b.weight is c.weight
    assert a.weight.device == META
    assert a.bias is not b.bias


def test_an_optimizer_follows_its_parameters_with_groups_and_state():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rebind_optimizer(optimizer, move_module(model, META), META)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert set(optimizer.state) == {model.weight, model.bias}
    assert optimizer.state[model.weight]["exp_avg"].device == META
    assert optimizer.state[model.weight]["step"].device.type == "cpu"


def test_lbfgs_which_keeps_its_own_list_of_parameters_follows_too():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    rebind_optimizer(optimizer, move_module(model, META), META)
    assert optimizer._params[0] is model.weight


def test_containers_keep_their_kind_and_other_values_their_identity():
    marker = object()
    value = OrderedDict(a=torch.ones(1), b=(marker, [torch.zeros(2)]))
    changed = map_tensors(value, lambda t: t + 1)
    assert type(changed) is OrderedDict
    assert changed["b"][0] is marker
    assert [t.tolist() for t in tensors_of(changed)] == [[2.0], [1.0, 1.0]]
    assert value["a"].item() == 1


def test_an_object_with_its_own_to_is_asked_to_move_itself():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert move_to_device(packed, META).data.device == META
