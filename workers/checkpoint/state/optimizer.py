"""Optimizer state by parameter name, so that it can move to another device, order or process.

torch's own state_dict numbers the parameters, and its load_state_dict casts every slot to the parameter's dtype and
takes `fused`, `foreach` and `capturable` from the file. Here names are stored, a slot keeps its dtype unless its
parameter was converted, and the live optimizer decides how its step is implemented.
"""

from functools import partial
from typing import Any

import torch

from workers.checkpoint.conversion import bits
from workers.checkpoint.format.dtypes import FLOATS, dtype_name
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key, OptimizerTree, read_optimizer
from workers.checkpoint.state import optimizer_positions
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.modules import LiveModules
from workers.checkpoint.tensors import sharded
from workers.errors import CheckpointError

IMPLEMENTATION = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Keys of a parameter group that say how a step is computed, not what it computes."""
ALGORITHM = frozenset({
    "alpha", "amsgrad", "betas", "centered", "dampening", "eps", "etas", "history_size", "initial_accumulator_value",
    "lambd", "lr_decay", "momentum", "momentum_decay", "nesterov", "rho", "step_sizes", "t0",
})  # fmt: skip
"""Keys that distinguish torch's optimizers, and that each has had since torch 1.6 or since it was added."""


def describe(entry: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return the optimizer's tree, with live tensors. `names`: parameter id -> name.
    Raises CheckpointError if it trains parameters without a name.
    """
    _check_complete(entry, optimizer)
    groups = [
        {
            "parameters": parameter_names(entry, group["params"], names),
            "options": {key: value for key, value in group.items() if key not in IMPLEMENTATION},
        }
        for group in optimizer.param_groups
    ]
    state = {}
    for parameter, slots in optimizer.state.items():
        if id(parameter) not in names or not all(type(slot) is str for slot in slots):
            raise CheckpointError(
                f"{entry} keeps state under {parameter!r:.80}, which has no name", "save that separately"
            )
        state[names[id(parameter)]] = dict(slots)
    return {"groups": groups, "state": state}


def _check_complete(entry: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse IPEX optimizers with float32 master weights, or lower halves, outside state and model."""
    for attributes in getattr(optimizer, "params_attr", {}).values():
        if (
            getattr(attributes, "master_parameter", None) is not None
            or getattr(attributes, "parameter_trail", None) is not None
        ):
            raise CheckpointError(
                f"{entry} keeps master weights outside its state (intel_extension_for_pytorch)",
                "call ipex.optimize without dtype when training, and use autocast for the speed",
            )


def stage_optimizer(stage: LoadStage, entry: str, optimizer: torch.optim.Optimizer, live: LiveModules) -> Apply:
    """Check and convert all that is loaded into `optimizer`; only the returned function changes it."""
    saved = _SavedOptimizer(stage, entry, live)
    groups = _pairs(stage, entry, saved.tree, optimizer, live)
    options = [saved.options([key for key, _ in pairs]) for pairs in groups]
    imported = not stage.entry(entry).type
    slots: dict[torch.Tensor, dict[str, Any]] = {}
    for pairs, group, group_options in zip(groups, optimizer.param_groups, options, strict=True):
        if imported and pairs:
            _check_algorithm(entry, optimizer, set(group_options), set(group))
        on_device = bool(group.get("capturable") or group.get("fused"))
        for key, parameter in pairs:
            if key in saved.tree.state:
                slots[parameter] = saved.slots(key, parameter, optimizer.state.get(parameter, {}), on_device)

    def apply() -> None:
        for group, pairs, group_options in zip(optimizer.param_groups, groups, options, strict=True):
            group["params"] = [parameter for _, parameter in pairs]
            for key, value in group_options.items():
                group[key] = _convert_option(group.get(key), value)
        optimizer.state.clear()
        optimizer.state.update(slots)
        if imported:  # convert values of older torch versions: before 1.12 a step count was a number
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    return apply


def _pairs(
    stage: LoadStage, entry: str, saved: OptimizerTree, optimizer: torch.optim.Optimizer, live: LiveModules
) -> list[optimizer_positions.Pairs]:
    """Pair saved keys with live parameters, by live group. A file with numbers only needs no modules."""
    if saved.numbered and not live.tensors:
        return optimizer_positions.by_position(stage, entry, saved, [g["params"] for g in optimizer.param_groups], live)
    # Live tensors that were one when saved are two after a move to XLA: the name is used once, for the one that stays.
    names = [list(dict.fromkeys(parameter_names(entry, g["params"], live.names))) for g in optimizer.param_groups]
    if saved.numbered:
        groups = [[live.tensors[name] for name in group] for group in names]
        return optimizer_positions.by_position(stage, entry, saved, groups, live)
    _check_parameters(entry, {name for group in names for name in group}, {str(key) for key in saved.keys})
    return [[(name, live.tensors[name]) for name in group] for group in names]


class _SavedOptimizer:
    """The stored side of an optimizer. Raises DamagedCheckpoint if its tree is malformed."""

    def __init__(self, stage: LoadStage, entry: str, live: LiveModules):
        self.tree = read_optimizer(entry, stage.entry(entry))
        self._group_of = {key: i for i, group in enumerate(self.tree.groups) for key in group}
        self._stage = stage
        self._entry = entry
        self._live = live

    def options(self, keys: list[Key]) -> dict[str, Any]:
        """Options of the group these parameters were in. A live group may merge several with equal options."""
        saved_options = (self.tree.options[self._group_of[key]] for key in keys)
        group_options = [
            {name: value for name, value in options.items() if name not in IMPLEMENTATION} for options in saved_options
        ]
        if any(options != group_options[0] for options in group_options):
            raise CheckpointError(
                f"entry {self._entry!r}: parameters of one live group had different options when saved",
                "group the parameters as when they were saved",
            )
        options: dict[str, Any] = self._stage.value(group_options[0], self._stage.read_now) if group_options else {}
        return options

    def slots(self, key: Key, parameter: torch.Tensor, live_slots: dict[str, Any], on_device: bool) -> dict[str, Any]:
        """State of one parameter, as the live optimizer needs it; in its existing tensors if they fit."""
        stage, name = self._stage, self._live.names.get(id(parameter))
        stored = stage.dtype(name) if name else ""

        def make_tensor(slot: str, tensor: str) -> torch.Tensor:
            device, dtype = parameter.device, bits.torch_dtype(stage.dtype(tensor))
            if slot == "step":
                device = device if on_device else torch.device("cpu")
            elif self._follows_parameter(tensor, parameter, stored):
                dtype = parameter.dtype
            else:
                dtype = stage.target_dtype(tensor, device)
            return _slot_tensor(stage, tensor, dtype, device, live_slots.get(slot), parameter)

        return {slot: stage.value(tree, partial(make_tensor, slot)) for slot, tree in self.tree.state[key].items()}

    def _follows_parameter(self, tensor: str, parameter: torch.Tensor, parameter_dtype: str) -> bool:
        """Check whether a slot takes its parameter's dtype: it does if it had it when saved.
        Without a model in the file this is unknown; then a slot with its parameter's shape follows it, as in torch.
        """
        dtype = self._stage.dtype(tensor)
        if parameter_dtype:
            return dtype == parameter_dtype != dtype_name(parameter.dtype)
        has_shape = self._stage.shape(tensor) == tuple(parameter.shape)
        return has_shape and dtype in FLOATS and parameter.is_floating_point()


def _slot_tensor(
    stage: LoadStage, name: str, dtype: torch.dtype, device: torch.device, current: Any, parameter: torch.Tensor
) -> torch.Tensor:
    """Return the tensor for a slot: the existing one, one sharded like its parameter, or a new one."""
    shape = stage.shape(name)
    fits = isinstance(current, torch.Tensor) and (current.dtype, current.device, tuple(current.shape)) == (
        dtype,
        device,
        shape,
    )
    if not fits and sharded.is_sharded(parameter) and shape == tuple(parameter.shape):
        current, fits = sharded.empty_like(parameter, dtype), True
    if not fits:
        return stage.new_tensor(name, dtype, device)
    stage.fill_into(name, sharded.local_part(current), sharded.box_of(current))
    tensor: torch.Tensor = current
    return tensor


def _check_parameters(entry: str, live: set[str], stored: set[str]) -> None:
    missing, extra = sorted(live - stored), sorted(stored - live)
    if missing or extra:
        raise CheckpointError(
            f"entry {entry!r}: the live optimizer has {len(missing)} parameters that the saved one did not have "
            f"({first_names(missing)}), and lacks {len(extra)} ({first_names(extra)})",
            "give it the parameters that were saved",
        )


def _check_algorithm(entry: str, optimizer: torch.optim.Optimizer, saved: set[str], live: set[str]) -> None:
    """Check the optimizer's class by its group options, because torch.save files do not contain it."""
    missing, extra = sorted((live - saved) & ALGORITHM), sorted((saved - live) & ALGORITHM)
    if missing or extra:
        differences = [f"lack {', '.join(missing)}"] * bool(missing) + [f"have {', '.join(extra)}"] * bool(extra)
        raise CheckpointError(
            f"entry {entry!r} is not the state of {type(optimizer).__name__}: its groups {' and '.join(differences)}",
            "build the optimizer that was saved, or leave the entry out",
        )


def _convert_option(live: Any, saved: Any) -> Any:
    """Convert a saved option to the live option's form: a learning rate may be a tensor or a number."""
    if isinstance(live, torch.Tensor):
        return torch.as_tensor(saved, dtype=live.dtype).to(live.device)
    return saved.item() if isinstance(saved, torch.Tensor) and saved.dim() == 0 else saved


def parameter_names(entry: str, parameters: list[torch.Tensor], names: dict[int, str]) -> list[str]:
    unknown = [p for p in parameters if id(p) not in names]
    if unknown:
        p = unknown[0]
        raise CheckpointError(
            f"{entry}: {len(unknown)} of {len(parameters)} parameters of a group are not those of the saved modules"
            f" (the first: shape {list(p.shape)}, {p.dtype} on {p.device}), so its steps train nothing",
            "build the optimizer after the model is on its device, and name its model in the same state",
        )
    return [names[id(p)] for p in parameters]
