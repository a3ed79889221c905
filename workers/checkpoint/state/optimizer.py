"""Optimizer state by parameter name: it follows a parameter to another device, another order, another process.

torch's own state_dict numbers the parameters, and its load_state_dict casts every slot to the parameter's dtype and
takes `fused`, `foreach` and `capturable` from the file. Here names are kept, a slot keeps its dtype unless its
parameter was converted, and how the step is implemented is the live optimizer's own business.
"""

from functools import partial
from typing import Any

import torch

from workers.checkpoint.format.dtypes import FLOATS, dtype_name
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key, OptimizerTree, read_optimizer
from workers.checkpoint.state import bits, optimizer_positions, sharded
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.modules import LiveModules
from workers.errors import CheckpointError

IMPLEMENTATION = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that say how a step is computed, not what it computes."""
ALGORITHM = frozenset({
    "alpha", "amsgrad", "betas", "centered", "dampening", "eps", "etas", "history_size", "initial_accumulator_value",
    "lambd", "lr_decay", "momentum", "momentum_decay", "nesterov", "rho", "step_sizes", "t0",
})  # fmt: skip
"""Keys that tell torch's optimizers apart, and that each of them has had since torch 1.6 or since it exists."""


def describe(entry: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Its tree, still with live tensors. `names`: parameter id -> name. Raises where it trains other parameters."""
    _check_whole(entry, optimizer)
    groups = [
        {
            "parameters": parameter_names(entry, group["params"], names),
            "options": {key: value for key, value in group.items() if key not in IMPLEMENTATION},
        }
        for group in optimizer.param_groups
    ]
    state = {}
    for parameter, held in optimizer.state.items():
        if id(parameter) not in names or not all(type(slot) is str for slot in held):
            raise CheckpointError(
                f"{entry} keeps state under {parameter!r:.80}, which cannot be named", "save that apart"
            )
        state[names[id(parameter)]] = dict(held)
    return {"groups": groups, "state": state}


def _check_whole(entry: str, optimizer: torch.optim.Optimizer) -> None:
    """IPEX hangs float32 master weights, or their lower halves, on the optimizer: neither state nor model has them."""
    for held in getattr(optimizer, "params_attr", {}).values():
        if getattr(held, "master_parameter", None) is not None or getattr(held, "parameter_trail", None) is not None:
            raise CheckpointError(
                f"{entry} keeps master weights outside its state (intel_extension_for_pytorch)",
                "call ipex.optimize without dtype when training, and use autocast for the speed",
            )


def stage_optimizer(stage: LoadStage, entry: str, optimizer: torch.optim.Optimizer, live: LiveModules) -> Apply:
    """Check and convert all that goes into `optimizer`; it is changed only by what is returned."""
    saved = _Saved(stage, entry, live)
    groups = _pairs(stage, entry, saved.tree, optimizer, live)
    options = [saved.options([key for key, _ in pairs]) for pairs in groups]
    imported = not stage.entry(entry).type
    slots: dict[torch.Tensor, dict[str, Any]] = {}
    for pairs, group, wanted in zip(groups, optimizer.param_groups, options, strict=True):
        if imported and pairs:
            _check_algorithm(entry, optimizer, set(wanted), set(group))
        on_device = bool(group.get("capturable") or group.get("fused"))
        for key, parameter in pairs:
            if key in saved.tree.state:
                slots[parameter] = saved.slots(key, parameter, optimizer.state.get(parameter, {}), on_device)

    def apply() -> None:
        for group, pairs, wanted in zip(optimizer.param_groups, groups, options, strict=True):
            group["params"] = [parameter for _, parameter in pairs]
            for key, value in wanted.items():
                group[key] = _like(group.get(key), value)
        optimizer.state.clear()
        optimizer.state.update(slots)
        if imported:  # older torches had other values there: a count of steps was a number before 1.12
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    return apply


def _pairs(
    stage: LoadStage, entry: str, saved: OptimizerTree, optimizer: torch.optim.Optimizer, live: LiveModules
) -> list[optimizer_positions.Pairs]:
    """Saved keys with live parameters, group by group as they are live. A file of numbers alone needs no modules."""
    if saved.numbered and not live.kept:
        return optimizer_positions.by_position(stage, entry, saved, [g["params"] for g in optimizer.param_groups], live)
    # Live tensors that were one when saved come as two after a move to XLA: the name remains once, with the kept one.
    names = [list(dict.fromkeys(parameter_names(entry, g["params"], live.names))) for g in optimizer.param_groups]
    if saved.numbered:
        groups = [[live.kept[name] for name in group] for group in names]
        return optimizer_positions.by_position(stage, entry, saved, groups, live)
    _check_same(entry, {name for group in names for name in group}, {str(key) for key in saved.keys})
    return [[(name, live.kept[name]) for name in group] for group in names]


class _Saved:
    """The stored side of an optimizer. Raises DamagedCheckpoint where its tree is malformed."""

    def __init__(self, stage: LoadStage, entry: str, live: LiveModules):
        self.tree = read_optimizer(entry, stage.entry(entry))
        self._group_of = {key: i for i, group in enumerate(self.tree.groups) for key in group}
        self._stage = stage
        self._entry = entry
        self._live = live

    def options(self, keys: list[Key]) -> dict[str, Any]:
        """Of the group these parameters were in; a live group may join several whose options are equal."""
        told = (self.tree.options[self._group_of[key]] for key in keys)
        found = [{name: value for name, value in options.items() if name not in IMPLEMENTATION} for options in told]
        if any(options != found[0] for options in found):
            raise CheckpointError(
                f"entry {self._entry!r}: parameters of one live group had different options when saved",
                "group the parameters as they were",
            )
        options: dict[str, Any] = self._stage.value(found[0], self._stage.now) if found else {}
        return options

    def slots(self, key: Key, parameter: torch.Tensor, held: dict[str, Any], on_device: bool) -> dict[str, Any]:
        """State of one parameter, where and as the live optimizer wants it; in the tensors it has, if they suit."""
        stage, name = self._stage, self._live.names.get(id(parameter))
        stored = stage.dtype(name) if name else ""

        def place(slot: str, tensor: str) -> torch.Tensor:
            device, dtype = parameter.device, bits.torch_dtype(stage.dtype(tensor))
            if slot == "step":
                device = device if on_device else torch.device("cpu")
            elif self._follows(tensor, parameter, stored):
                dtype = parameter.dtype
            else:
                dtype = stage.wanted(tensor, device)
            return _placed(stage, tensor, dtype, device, held.get(slot), parameter)

        return {slot: stage.value(tree, partial(place, slot)) for slot, tree in self.tree.state[key].items()}

    def _follows(self, tensor: str, parameter: torch.Tensor, stored: str) -> bool:
        """Whether a slot takes on its parameter's dtype: it had it before. Of a file without the model that is not
        known; there a slot that is shaped like its parameter follows it, as it does in torch."""
        dtype = self._stage.dtype(tensor)
        if stored:
            return dtype == stored != dtype_name(parameter.dtype)
        shaped = self._stage.shape(tensor) == tuple(parameter.shape)
        return shaped and dtype in FLOATS and parameter.is_floating_point()


def _placed(
    stage: LoadStage, name: str, dtype: torch.dtype, device: torch.device, held: Any, parameter: torch.Tensor
) -> torch.Tensor:
    """The tensor a slot gets: the one that is there, one cut like its parameter, or a new one."""
    shape = stage.shape(name)
    there = isinstance(held, torch.Tensor) and (held.dtype, held.device, tuple(held.shape)) == (dtype, device, shape)
    if not there and sharded.is_sharded(parameter) and shape == tuple(parameter.shape):
        held, there = sharded.empty_like(parameter, dtype), True
    if not there:
        return stage.made(name, dtype, device)
    stage.into(name, sharded.local(held), sharded.box_of(held))
    kept: torch.Tensor = held
    return kept


def _check_same(entry: str, live: set[str], stored: set[str]) -> None:
    missing, extra = sorted(live - stored), sorted(stored - live)
    if missing or extra:
        raise CheckpointError(
            f"entry {entry!r}: the live optimizer has {len(missing)} parameters the saved one had not "
            f"({first_names(missing)}), and lacks {len(extra)} ({first_names(extra)})",
            "give it the parameters it had",
        )


def _check_algorithm(entry: str, optimizer: torch.optim.Optimizer, saved: set[str], live: set[str]) -> None:
    """Files of torch.save do not tell the optimizer's class; the options in its groups nearly do."""
    missing, extra = sorted((live - saved) & ALGORITHM), sorted((saved - live) & ALGORITHM)
    if missing or extra:
        differ = [f"lack {', '.join(missing)}"] * bool(missing) + [f"have {', '.join(extra)}"] * bool(extra)
        raise CheckpointError(
            f"entry {entry!r} is not the state of {type(optimizer).__name__}: its groups {' and '.join(differ)}",
            "build the optimizer that was saved, or leave the entry out",
        )


def _like(live: Any, saved: Any) -> Any:
    """An option as a tensor or as a number, as the live optimizer has it: a learning rate may be either."""
    if isinstance(live, torch.Tensor):
        return torch.as_tensor(saved, dtype=live.dtype).to(live.device)
    return saved.item() if isinstance(saved, torch.Tensor) and saved.dim() == 0 else saved


def parameter_names(entry: str, parameters: list[torch.Tensor], names: dict[int, str]) -> list[str]:
    strangers = [p for p in parameters if id(p) not in names]
    if strangers:
        p = strangers[0]
        raise CheckpointError(
            f"{entry}: {len(strangers)} of {len(parameters)} parameters of a group are not those of the saved modules"
            f" (the first: shape {list(p.shape)}, {p.dtype} on {p.device}), so its steps train nothing",
            "build the optimizer after the model is on its device, and name its model in the same state",
        )
    return [names[id(p)] for p in parameters]
