"""Which parameter a number in an optimizer's state dict means, as far as the file allows to know.

Names that the file tells (`param_names` in the groups, or names in place of numbers) are taken where a model in the
file has them with fitting shapes. Else only numbers are known. With the model at hand they get names by one rule: a
group has its parameters in the order of `named_parameters`. That settles a shape which only one group has, and has as
often as the model. Anything else could be several parameters: it stays by number, and a note says why. A file that
does not keep the model's order settles only shapes that occur once.
"""

from collections import Counter, defaultdict

from workers.checkpoint.exchange.imported_state import ImportedState
from workers.checkpoint.exchange.optimizer_state import NotOptimizerStateError, OptimizerStateDict
from workers.checkpoint.format.message_text import first_names
from workers.checkpoint.format.optimizer_tree import Key
from workers.checkpoint.format.wrappers import AmbiguousNamesError, fit, without_wrappers

Shape = tuple[int, ...]
Names = dict[Key, str]
Modules = dict[str, dict[str, Shape]]


def add_optimizers(found: ImportedState) -> None:
    """Make entries of the optimizers that were found. To be called once ties are known."""
    modules: Modules = {
        name: _parameters(found, name) for name, entry in found.entries.items() if entry.kind == "module"
    }
    for entry, told in found.optimizers.items():
        try:
            _place(found, entry, told, modules)
        except NotOptimizerStateError as e:
            found.unfit[entry] = str(e)


def _place(found: ImportedState, entry: str, told: OptimizerStateDict, modules: Modules) -> None:
    """Raises NotOptimizerStateError where it names parameters that are nowhere in the file."""
    texts = _told_names(told)
    names, unused = _by_text(found, told, texts, modules) if texts else ({}, "")
    if names:
        found.notes.append(f"{entry}: the file names its {len(names)} parameters")
        return found.place_optimizer(entry, told, names, {})
    if not told.numbered:
        _check_are_names(found, texts, modules, unused)
        told = told.in_numbers()
    names, why = _by_order(told, modules, found.ordered)
    found.place_optimizer(entry, told, {}, names)
    unused = f" Names that the file tells are not used: {unused}." if unused else ""
    uncertain = (
        f", and their names are uncertain: {why}.{unused}"
        " Loading goes by position, as in torch: build the optimizer with the same groups in the same order."
    )
    says = uncertain if why else f"; their names follow from shapes and order.{unused}"
    found.notes.append(f"{entry}: the file numbers its {len(told.keys)} parameters{says}")
    return None


def _check_are_names(found: ImportedState, texts: list[str], modules: Modules, why: str) -> None:
    """Parameters that go by text go by the names of a model: some of which are in the file, if it has a model."""
    known = {without_wrappers(name) for module in modules for name in _stored_names(found, module)}
    if not {without_wrappers(text) for text in texts} & known and (known or any(map(str.isdecimal, texts))):
        raise NotOptimizerStateError(f"calls its parameters {first_names(texts)}; {why}")


def _parameters(found: ImportedState, module: str) -> dict[str, Shape]:
    """In the order of the model; what is tied comes once. Batch norm's running statistics are no parameters."""
    names = [name for name in found.tensors if name.startswith(f"{module}/")]
    counted = {name.rpartition(".")[0] for name in names if name.endswith(".num_batches_tracked")}
    statistics = {f"{prefix}.{kind}" for prefix in counted for kind in ("running_mean", "running_var")}
    entries = {name: found.tensors[name] for name in names if name not in statistics}
    return {
        name: entry.shape
        for name, entry in entries.items()
        if entry.role == "parameter" and (entry.view is not None or not entry.alias_of)
    }


def _told_names(told: OptimizerStateDict) -> list[str]:
    """One name for each parameter, in order; [] where the file does not tell them all, each once."""
    if not told.numbered:
        return [str(key) for key in told.keys]
    texts: list[str] = []
    for group, options in zip(told.groups, told.options, strict=True):
        names = options.get("param_names")
        if not isinstance(names, list) or len(names) != len(group) or not all(type(n) is str for n in names):
            return []
        texts += names
    return texts if len(set(texts)) == len(texts) else []


def _by_text(found: ImportedState, told: OptimizerStateDict, texts: list[str], modules: Modules) -> tuple[Names, str]:
    """Key -> name, where one module has all the names; else why not."""
    if told.numbered and told.keys != list(range(len(told.keys))):
        return {}, "its numbers are not in order"
    fitting: dict[str, Names] = {}
    equal: set[str] = set()
    why = "no model in the file has them"
    for module in modules:
        known = _stored_names(found, module)
        try:
            matched = fit(texts, known, every_place=False, sides=("optimizer's", f"{module}'s"))
        except AmbiguousNamesError as e:
            why = f"in {module}, {e}"
            continue
        if matched is None:
            strangers = [text for text in texts if text not in known]
            why = f"{module} has no {first_names(strangers)}"
            continue
        names = {key: known[matched.names[text]] for key, text in zip(told.keys, texts, strict=True)}
        misfits = [n for key, n in names.items() if told.shape_of(key) not in (None, found.tensors[n].shape)]
        if misfits or len(set(names.values())) != len(names):
            why = f"the shapes of {first_names(misfits)} differ" if misfits else "two of them are tied"
            continue
        fitting[module] = names
        equal |= set() if matched.stripped else {module}
    fitting = {module: names for module, names in fitting.items() if module in equal} or fitting
    if len(fitting) > 1:
        return {}, f"{' and '.join(fitting)} have them alike"
    return (fitting.popitem()[1], "") if fitting else ({}, why)


def _stored_names(found: ImportedState, module: str) -> dict[str, str]:
    """What the model calls its parameters -> the name each is stored under, which ties share."""
    names = [n for n, e in found.tensors.items() if n.startswith(f"{module}/") and e.role == "parameter"]
    stored = {}
    for name in names:
        entry = found.tensors[name]
        stored[name.removeprefix(f"{module}/")] = name if entry.view or not entry.alias_of else entry.alias_of
    return stored


def _by_order(told: OptimizerStateDict, modules: Modules, ordered: bool) -> tuple[Names, str]:
    shapes = {key: shape for key in told.keys if (shape := told.shape_of(key)) is not None}
    if len(shapes) < len(told.keys):
        return {}, f"no state tells the shapes of {len(told.keys) - len(shapes)} of them"
    if not modules:
        return {}, "there is no model in the file"
    tried = {module: _in_order(told, shapes, module, parameters, ordered) for module, parameters in modules.items()}
    fitting = [module for module, (names, _) in tried.items() if names]
    if len(fitting) > 1:
        return {}, f"they fit {' and '.join(fitting)} alike"
    return tried[fitting[0]] if fitting else ({}, "; ".join(dict.fromkeys(why for _, why in tried.values())))


def _in_order(
    told: OptimizerStateDict, shapes: dict[Key, Shape], module: str, parameters: dict[str, Shape], ordered: bool
) -> tuple[Names, str]:
    places: dict[Shape, list[int]] = defaultdict(list)
    for i, shape in enumerate(parameters.values()):
        places[shape].append(i)
    if why := _undecided(told, shapes, module, places, ordered):
        return {}, why
    left = {shape: iter(found) for shape, found in places.items()}
    chosen = {key: next(left[shapes[key]]) for key in told.keys}
    for group in told.groups:
        order = [chosen[key] for key in group]
        if ordered and order != sorted(order):
            return {}, f"a group does not have them in the order of {module}"
    names = [*parameters]
    return {key: names[i] for key, i in chosen.items()}, ""


def _undecided(
    told: OptimizerStateDict, shapes: dict[Key, Shape], module: str, places: dict[Shape, list[int]], ordered: bool
) -> str:
    """The first shape that several parameters have, and nothing tells which is which; "" where there is none."""
    owners = Counter(shape for group in told.groups for shape in {shapes[key] for key in group})
    for shape, count in Counter(shapes.values()).items():
        if count != len(places[shape]):
            return f"{count} of them and {len(places[shape])} tensors of {module} have the shape {list(shape)}"
        if owners[shape] > 1:
            return f"{owners[shape]} groups have parameters of shape {list(shape)}"
        if count > 1 and not ordered:
            return f"{count} have the shape {list(shape)}, and the file does not keep the order of {module}"
    return ""
