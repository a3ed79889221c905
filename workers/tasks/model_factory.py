"""Call the user's factories of a model and of sample inputs. A seed makes both equal in every environment."""

from functools import partial

from torch import nn

from cluster.errors import NotFound, UserError
from workers.devices.backends import random_state
from workers.measurement.inputs import Sample, as_sample
from workers.tasks import transformers_model
from workers.tasks.context import Context
from workers.tasks.entry import check_call, load_function, sibling


def make_model(context: Context) -> nn.Module:
    """Create the model by the entry's factory, on the CPU. Raises UserError if it does not return a Module."""
    from_transformers = context.entry.startswith(transformers_model.PREFIX)
    factory = partial(transformers_model.make, context.entry) if from_transformers else load_function(context.entry)
    if not from_transformers:
        check_call(factory, context.entry)
    random_state.seed(context.backend, context.seed)
    model = factory()
    if not isinstance(model, nn.Module):
        raise UserError(f"{context.entry} returned {type(model).__name__}", "return a torch.nn.Module from the factory")
    return model


def make_sample(context: Context) -> Sample | None:
    """Create the inputs of one call, by the factory named in the argument `sample_input`, else by the function
    `sample_input` beside the entry. None without either.
    """
    requested = context.arguments.get("sample_input")
    if context.entry.startswith(transformers_model.PREFIX) and not requested:
        random_state.seed(context.backend, context.seed)
        return transformers_model.sample(context.entry, batch_size(context))
    entry = requested or sibling(context.entry, "sample_input")
    try:
        factory = load_function(entry)
    except NotFound:
        if requested:
            raise
        return None
    check_call(factory, entry, "batch_size")
    random_state.seed(context.backend, context.seed)
    return as_sample(factory(batch_size(context)))


def batch_size(context: Context) -> int:
    """Batch size of the candidate or job, else of the task's arguments, else 1."""
    size = int(context.batch_size or context.arguments.get("batch_size") or 1)
    if size < 1:
        raise UserError(f"batch_size is {size}", "give at least 1")
    return size


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; tied tensors count once."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
