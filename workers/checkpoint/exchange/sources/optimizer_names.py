"""Find out which parameter a number in an optimizer's state dict means, as far as the file allows.

Names in the file (`param_names` in the groups, or names instead of numbers) are used if a model in the file has them
with matching shapes. Otherwise the file has only numbers. If the file has the model, numbers get names by one rule: a
group has its parameters in the order of `named_parameters`. That decides a shape which only one group has, and as often
as the model has it. Any other number may be one of several parameters: it stays a number, and a note says why. In a
file that does not keep the model's order, only shapes that occur once are decided.
"""

from collections import Counter, defaultdict

from workers.checkpoint.exchange.sources.imported_state import ImportedState
from workers.checkpoint.exchange.sources.optimizer_state import NotOptimizerStateError, OptimizerStateDict
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit, without_wrappers

Shape = tuple[int, ...]
Names = dict[Key, str]
Modules = dict[str, dict[str, Shape]]


def add_optimizers(state: ImportedState) -> None:
    """Add entries for the optimizers in the file. Call it after `find_ties`."""
    modules: Modules = {
        name: _parameters(state, name) for name, entry in state.entries.items() if entry.kind == "module"
    }
    for entry, optimizer in state.optimizers.items():
        try:
            _add_optimizer(state, entry, optimizer, modules)
        except NotOptimizerStateError as e:
            state.invalid_optimizers[entry] = str(e)


def _add_optimizer(state: ImportedState, entry: str, optimizer: OptimizerStateDict, modules: Modules) -> None:
    """Add one optimizer. Raises NotOptimizerStateError if it names parameters that are not in the file."""
    texts = _names_in_file(optimizer)
    names, unused = _match_by_name(state, optimizer, texts, modules) if texts else ({}, "")
    if names:
        state.notes.append(f"{entry}: the file names its {len(names)} parameters")
        return state.add_optimizer(entry, optimizer, names, {})
    if not optimizer.numbered:
        _check_are_names(state, texts, modules, unused)
        optimizer = optimizer.with_numbers()
    names, reason = _match_by_order(optimizer, modules, state.ordered)
    state.add_optimizer(entry, optimizer, {}, names)
    unused = f" Names in the file are not used: {unused}." if unused else ""
    uncertain = (
        f", and their names are uncertain: {reason}.{unused}"
        " Loading matches by position, as in torch: build the optimizer with the same groups in the same order."
    )
    message = uncertain if reason else f"; their names follow from shapes and order.{unused}"
    state.notes.append(f"{entry}: the file numbers its {len(optimizer.keys)} parameters{message}")
    return None


def _check_are_names(state: ImportedState, texts: list[str], modules: Modules, reason: str) -> None:
    """Check that text keys are parameter names: some must be in the file's model, if it has one."""
    model_names = {without_wrappers(name) for module in modules for name in _stored_names(state, module)}
    if not {without_wrappers(text) for text in texts} & model_names and (model_names or any(map(str.isdecimal, texts))):
        raise NotOptimizerStateError(f"calls its parameters {first_names(texts)}; {reason}")


def _parameters(state: ImportedState, module: str) -> dict[str, Shape]:
    """Shapes of a model's parameters, in its order, ties once. Batch norm's running statistics are not parameters."""
    names = [name for name in state.tensors if name.startswith(f"{module}/")]
    counted = {name.rpartition(".")[0] for name in names if name.endswith(".num_batches_tracked")}
    statistics = {f"{prefix}.{kind}" for prefix in counted for kind in ("running_mean", "running_var")}
    entries = {name: state.tensors[name] for name in names if name not in statistics}
    return {
        name: entry.shape
        for name, entry in entries.items()
        if entry.role == "parameter" and (entry.view is not None or not entry.alias_of)
    }


def _names_in_file(optimizer: OptimizerStateDict) -> list[str]:
    """Return one name for each parameter, in order; [] if the file does not have all of them, each once."""
    if not optimizer.numbered:
        return [str(key) for key in optimizer.keys]
    texts: list[str] = []
    for group, options in zip(optimizer.groups, optimizer.options, strict=True):
        names = options.get("param_names")
        if not isinstance(names, list) or len(names) != len(group) or not all(type(n) is str for n in names):
            return []
        texts += names
    return texts if len(set(texts)) == len(texts) else []


def _match_by_name(
    state: ImportedState, optimizer: OptimizerStateDict, texts: list[str], modules: Modules
) -> tuple[Names, str]:
    """Map keys to names if one module has all the names; else {} and the reason."""
    if optimizer.numbered and optimizer.keys != list(range(len(optimizer.keys))):
        return {}, "its numbers are not in order"
    fitting: dict[str, Names] = {}
    equal: set[str] = set()
    reason = "no model in the file has them"
    for module in modules:
        stored_names = _stored_names(state, module)
        try:
            result = fit(texts, stored_names, must_match_all=False, sides=("optimizer's", f"{module}'s"))
        except AmbiguousNamesError as e:
            reason = f"in {module}, {e}"
            continue
        if result is None:
            unknown = [text for text in texts if text not in stored_names]
            reason = f"{module} has no {first_names(unknown)}"
            continue
        names = {key: stored_names[result.names[text]] for key, text in zip(optimizer.keys, texts, strict=True)}
        mismatches = [n for key, n in names.items() if optimizer.shape_of(key) not in (None, state.tensors[n].shape)]
        if mismatches or len(set(names.values())) != len(names):
            reason = f"the shapes of {first_names(mismatches)} differ" if mismatches else "two of them are tied"
            continue
        fitting[module] = names
        equal |= set() if result.stripped else {module}
    fitting = {module: names for module, names in fitting.items() if module in equal} or fitting
    if len(fitting) > 1:
        return {}, f"{' and '.join(fitting)} have the same names"
    return (fitting.popitem()[1], "") if fitting else ({}, reason)


def _stored_names(state: ImportedState, module: str) -> dict[str, str]:
    """Map the model's parameter names to the names they are stored under; ties share one."""
    names = [n for n, e in state.tensors.items() if n.startswith(f"{module}/") and e.role == "parameter"]
    stored = {}
    for name in names:
        entry = state.tensors[name]
        stored[name.removeprefix(f"{module}/")] = name if entry.view or not entry.alias_of else entry.alias_of
    return stored


def _match_by_order(optimizer: OptimizerStateDict, modules: Modules, ordered: bool) -> tuple[Names, str]:
    shapes = {key: shape for key in optimizer.keys if (shape := optimizer.shape_of(key)) is not None}
    if len(shapes) < len(optimizer.keys):
        return {}, f"no state shows the shapes of {len(optimizer.keys) - len(shapes)} of them"
    if not modules:
        return {}, "there is no model in the file"
    results = {
        module: _assign_in_order(optimizer, shapes, module, parameters, ordered)
        for module, parameters in modules.items()
    }
    fitting = [module for module, (names, _) in results.items() if names]
    if len(fitting) > 1:
        return {}, f"they fit {' and '.join(fitting)} equally well"
    return results[fitting[0]] if fitting else ({}, "; ".join(dict.fromkeys(reason for _, reason in results.values())))


def _assign_in_order(
    optimizer: OptimizerStateDict, shapes: dict[Key, Shape], module: str, parameters: dict[str, Shape], ordered: bool
) -> tuple[Names, str]:
    positions: dict[Shape, list[int]] = defaultdict(list)
    for i, shape in enumerate(parameters.values()):
        positions[shape].append(i)
    if reason := _ambiguity(optimizer, shapes, module, positions, ordered):
        return {}, reason
    remaining = {shape: iter(indices) for shape, indices in positions.items()}
    chosen = {key: next(remaining[shapes[key]]) for key in optimizer.keys}
    for group in optimizer.groups:
        order = [chosen[key] for key in group]
        if ordered and order != sorted(order):
            return {}, f"a group does not have them in the order of {module}"
    names = [*parameters]
    return {key: names[i] for key, i in chosen.items()}, ""


def _ambiguity(
    optimizer: OptimizerStateDict,
    shapes: dict[Key, Shape],
    module: str,
    positions: dict[Shape, list[int]],
    ordered: bool,
) -> str:
    """Describe the first shape that does not decide which parameter is which; "" if there is none."""
    owners = Counter(shape for group in optimizer.groups for shape in {shapes[key] for key in group})
    for shape, count in Counter(shapes.values()).items():
        if count != len(positions[shape]):
            return f"{count} of them and {len(positions[shape])} tensors of {module} have the shape {list(shape)}"
        if owners[shape] > 1:
            return f"{owners[shape]} groups have parameters of shape {list(shape)}"
        if count > 1 and not ordered:
            return f"{count} have the shape {list(shape)}, and the file does not keep the order of {module}"
    return ""
