"""Create models of `transformers` from a configuration alone: random weights, no downloads, no remote code.

`transformers:bert` is an architecture in its default size. `transformers:config.json` is a configuration file in the
working folder, in the hub's format: it creates the first class in `architectures`, else the bare model.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cluster.errors import NotFound, UserError, nearest
from workers.measurement.inputs import Sample

PREFIX = "transformers:"
TOKENS, DECODER_TOKENS, AUDIO_SAMPLES = 128, 16, 16_000
LIMIT_BYTES = 1 << 20


class MissingLibraryError(UserError):
    """`transformers` is not installed in this environment."""


def make(entry: str) -> nn.Module:
    """Create the model in float32, without a key-value cache. Raises NotFound, UserError, the constructor's errors."""
    config = _config(entry)
    config.use_cache = False
    model: nn.Module = _model_class(config)(config)
    return model.float()


def sample(entry: str, batch_size: int) -> Sample:
    """Create random inputs for the model's main input: up to 128 tokens, an image, or one second of sound."""
    config = _config(entry)
    name = _model_class(config).main_input_name
    makers = {"input_ids": _tokens, "pixel_values": _images, "input_features": _mel, "input_values": _sound}
    if name not in makers:
        raise UserError(
            f"the input {name} of {config.model_type} has no fixed shape",
            "write a function that creates the model, with sample_input(batch_size) beside it",
        )
    inputs = {name: makers[name](config, batch_size)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, batch_size)[:, :DECODER_TOKENS]
    return Sample((), inputs)


def _library() -> Any:
    if find_spec("transformers") is None:
        raise MissingLibraryError(
            "transformers is not installed in this environment", "add it to the pool's requirements"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers


def _config(entry: str) -> Any:
    library, requested = _library(), entry.removeprefix(PREFIX)
    options = _read(requested) if requested.endswith(".json") else {"model_type": requested}
    kind = options.pop("model_type", "")
    choices = sorted(library.CONFIG_MAPPING.keys())
    if kind not in choices:
        raise NotFound(f"transformers has no model type {kind!r}", nearest(str(kind), choices))
    return library.AutoConfig.for_model(kind, **options)


def _read(requested: str) -> dict[str, Any]:
    folder = Path.cwd().resolve()
    path = (folder / requested).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        existing = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.json"))
        raise NotFound(f"no file {requested} in the working folder", nearest(requested, existing[:20]))
    try:
        options = json.loads(path.read_text()) if path.stat().st_size <= LIMIT_BYTES else None
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UserError(f"{requested} is not a configuration", "save one with config.to_json_file(path)")
    return options


def _model_class(config: Any) -> Any:
    """Return one of the library's own classes. References to other code in a configuration (`auto_map`) are ignored."""
    library = _library()
    if not config.architectures:
        try:
            return library.MODEL_MAPPING[type(config)]
        except KeyError:
            raise UserError(f"{config.model_type} has no bare model", "add a class to `architectures`") from None
    name = str(config.architectures[0])
    member = getattr(library, name, None)
    if not (isinstance(member, type) and issubclass(member, library.PreTrainedModel)):
        raise NotFound(f"transformers has no model class {name!r}", "another version of the library may have it")
    return member


def _tokens(config: Any, batch_size: int) -> Tensor:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or TOKENS
    return torch.randint(text.vocab_size, (batch_size, min(TOKENS, limit)))


def _images(config: Any, batch_size: int) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch_size, getattr(vision, "num_channels", 3), height, width)


def _mel(config: Any, batch_size: int) -> Tensor:
    return torch.randn(batch_size, config.num_mel_bins, 2 * config.max_source_positions)


def _sound(config: Any, batch_size: int) -> Tensor:
    return torch.randn(batch_size, AUDIO_SAMPLES)
