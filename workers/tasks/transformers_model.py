"""Models of `transformers` from a configuration alone: random weights, nothing fetched, nobody's code run.

`transformers:bert` is an architecture in its default sizes; `transformers:config.json` a configuration of the working
folder, as the hub keeps them: the class it names first in `architectures`, else the bare model.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cluster.errors import NotFound, UserError, nearest
from workers.optimizers.pass_context import Sample

PREFIX = "transformers:"
TOKENS, ANSWER_TOKENS, AUDIO_SAMPLES = 128, 16, 16_000
LIMIT_BYTES = 1 << 20


class MissingLibraryError(UserError):
    """`transformers` is not in this environment."""


def make(entry: str) -> nn.Module:
    """In float32, without a cache of keys. Raises NotFound, UserError, and what the model's own constructor raises."""
    config = _config(entry)
    config.use_cache = False
    model: nn.Module = _model_class(config)(config)
    return model.float()


def sample(entry: str, batch_size: int) -> Sample:
    """Random inputs of the kind the model takes first: up to 128 tokens, an image, a second of sound."""
    config = _config(entry)
    name = _model_class(config).main_input_name
    makers = {"input_ids": _tokens, "pixel_values": _images, "input_features": _mel, "input_values": _sound}
    if name not in makers:
        raise UserError(
            f"{config.model_type} takes {name}, which has no known shape",
            "write a function that makes the model, with sample_input(batch_size) beside it",
        )
    inputs = {name: makers[name](config, batch_size)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, batch_size)[:, :ANSWER_TOKENS]
    return Sample((), inputs)


def _library() -> Any:
    if find_spec("transformers") is None:
        raise MissingLibraryError("transformers is not in this environment", "add it to the pool's requirements")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers


def _config(entry: str) -> Any:
    library, named = _library(), entry.removeprefix(PREFIX)
    told = _read(named) if named.endswith(".json") else {"model_type": named}
    kind = told.pop("model_type", "")
    known = sorted(library.CONFIG_MAPPING.keys())
    if kind not in known:
        raise NotFound(f"transformers has no model type {kind!r}", nearest(str(kind), known))
    return library.AutoConfig.for_model(kind, **told)


def _read(named: str) -> dict[str, Any]:
    here = Path.cwd().resolve()
    path = (here / named).resolve()
    if not path.is_relative_to(here) or not path.is_file():
        there = sorted(str(p.relative_to(here)) for p in here.rglob("*.json"))
        raise NotFound(f"no file {named} in the working folder", nearest(named, there[:20]))
    try:
        told = json.loads(path.read_text()) if path.stat().st_size <= LIMIT_BYTES else None
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise UserError(f"{named} is no configuration", "save one with config.to_json_file(path)")
    return told


def _model_class(config: Any) -> Any:
    """One of the library's own classes; what a configuration says of code elsewhere (`auto_map`) is not followed."""
    library = _library()
    if not config.architectures:
        try:
            return library.MODEL_MAPPING[type(config)]
        except KeyError:
            raise UserError(f"{config.model_type} has no bare model", "name a class in `architectures`") from None
    name = str(config.architectures[0])
    found = getattr(library, name, None)
    if not (isinstance(found, type) and issubclass(found, library.PreTrainedModel)):
        raise NotFound(f"transformers has no model class {name!r}", "another version of the library may have it")
    return found


def _tokens(config: Any, batch_size: int) -> Tensor:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or TOKENS
    return torch.randint(text.vocab_size, (batch_size, min(TOKENS, longest)))


def _images(config: Any, batch_size: int) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch_size, getattr(vision, "num_channels", 3), height, width)


def _mel(config: Any, batch_size: int) -> Tensor:
    return torch.randn(batch_size, config.num_mel_bins, 2 * config.max_source_positions)


def _sound(config: Any, batch_size: int) -> Tensor:
    return torch.randn(batch_size, AUDIO_SAMPLES)
