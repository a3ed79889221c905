"""The user's factories: a model, and one call's inputs for it, made the same in every environment from one seed."""

from functools import partial

from torch import nn

from cluster.errors import NotFound, UserError
from workers.optimizers.pass_context import Sample, as_sample
from workers.tasks import transformers_model
from workers.tasks.context import Context
from workers.tasks.entry import check_call, load_function, sibling


def make_model(context: Context) -> nn.Module:
    """What the entry's factory returns, on the CPU. Raises UserError when that is no module."""
    ours = context.entry.startswith(transformers_model.PREFIX)
    factory = partial(transformers_model.make, context.entry) if ours else load_function(context.entry)
    if not ours:
        check_call(factory, context.entry)
    context.backend.seed(context.seed)
    model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(f"{context.entry} returned {type(model).__name__}", "the factory returns a torch.nn.Module")
    return model


def make_sample(context: Context) -> Sample | None:
    """Inputs of one call, from the factory named by `sample_input`, else one so called beside the entry, else None."""
    named = context.arguments.get("sample_input")
    if context.entry.startswith(transformers_model.PREFIX) and not named:
        context.backend.seed(context.seed)
        return transformers_model.sample(context.entry, batch_size(context))
    entry = named or sibling(context.entry, "sample_input")
    try:
        factory = load_function(entry)
    except NotFound:
        if named:
            raise
        return None
    check_call(factory, entry, "batch_size")
    context.backend.seed(context.seed)
    return as_sample(factory(batch_size(context)))


def batch_size(context: Context) -> int:
    """The candidate's or job's, else the task argument's, else 1."""
    size = int(context.batch_size or context.arguments.get("batch_size") or 1)
    if size < 1:
        raise UserError(f"batch_size is {size}", "give at least 1")
    return size


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tensor_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, a tie counted once."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
