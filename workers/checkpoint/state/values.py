"""Load entries that are neither modules nor optimizers: stateful objects, plain values, random state."""

from typing import Any

from workers.checkpoint.format.manifest import extra_states
from workers.checkpoint.format.optimizer_tree import as_torch, is_numbered, read_optimizer
from workers.checkpoint.state.load_stage import Apply, LoadStage
from workers.checkpoint.state.rng import check_restorable, restore_rng
from workers.errors import CheckpointError


def check_kind(stage: LoadStage, name: str, kind: str, live: Any) -> None:
    """Raise CheckpointError if an entry was saved from another kind of object than it is loaded into."""
    saved = stage.entry(name)
    if saved.kind != kind:
        raise CheckpointError(
            f"entry {name!r} was saved from a {saved.type or saved.kind} and is loaded into a {type(live).__name__}",
            "load it into an object of the same kind, or into None for plain values",
        )
    has_class = saved.type or kind == "stateful"  # an imported optimizer has no class
    if kind in ("optimizer", "stateful") and has_class and saved.type != type(live).__name__:
        raise CheckpointError(
            f"entry {name!r} holds the state of a {saved.type}, the live object is a {type(live).__name__}",
            f"build a {saved.type}, or leave the entry out",
        )


def plain_value(stage: LoadStage, name: str) -> Any:
    """Return an entry as values: a module as {tensor name: tensor}, with ties as one object.
    An optimizer imported by numbers is returned as torch's state_dict, others as they were described.
    """
    entry = stage.entry(name)
    if entry.kind == "rng":
        return stage.value(entry.tree, stage.read_now)
    if is_numbered(entry):
        return as_torch(read_optimizer(name, entry), stage.value)
    if entry.kind != "module":
        return stage.value(entry.tree)
    own = stage.reader.manifest.module_tensors(name)
    tensors = {
        n.removeprefix(f"{name}/"): stage.new_tensor(n, stage.target_dtype(n, stage.device), stage.device) for n in own
    }
    return tensors | extra_states(entry, stage.value)


def stage_stateful(stage: LoadStage, name: str, live: Any) -> Apply:
    value = stage.value(stage.entry(name).tree)
    return lambda: live.load_state_dict(value)


def stage_tree(stage: LoadStage, name: str, live: Any) -> Apply:
    """Refill a dict or list; its tensors are new ones."""
    value = stage.value(stage.entry(name).tree)
    if isinstance(live, dict) and isinstance(value, dict):
        return lambda: _refill(live, value)
    if isinstance(live, list) and isinstance(value, list):
        return lambda: live.__setitem__(slice(None), value)
    raise CheckpointError(
        f"entry {name!r} was saved from a {type(value).__name__} and cannot be loaded into a {type(live).__name__}",
        "load it into None for a plain value",
    )


def stage_rng(stage: LoadStage, name: str, device_types: set[str], rank: int) -> Apply:
    saved = stage.value(stage.entry(name).tree, stage.read_now)
    check_restorable(saved)
    used = {stage.device.type, *device_types}
    return lambda: stage.report.random.update(restore_rng(saved, stage.report.step, used, rank))


def _refill(live: dict[Any, Any], value: dict[Any, Any]) -> None:
    live.clear()
    live.update(value)
