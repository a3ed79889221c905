"""Memory that a job needs on each device: a size, or a model from whose dimensions it is estimated."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, Tag, model_validator

from cluster.errors import SpecError, UserError
from cluster.input.validation_errors import prefix_field, validate_model
from orchestrator.spec import job_spec_fields as f
from workers.models.memory.estimate import MemoryEstimate, estimate_memory

FILE_BYTES = 1 << 20


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


class MemorySpec(Model):
    """Input of the memory estimate. Each device holds the complete model; libraries and fragmentation are added."""

    model: dict[str, Any] | Annotated[str, Field(min_length=1)]
    """Dimensions of a transformer (hidden_size, num_hidden_layers, vocab_size, num_attention_heads, ...), or the path
    of a JSON file with them, such as the config.json of a model; relative to the job's file.
    """

    mode: Literal["training", "inference"] | None = None
    """Default: training for `task: train`, else inference."""

    batch: Annotated[StrictInt, Field(ge=1)] | None = None
    """Batch size of one device (default: `batch_size`)."""

    seq: Annotated[StrictInt, Field(ge=1)] | None = None
    """Tokens of one sample (default: the model's maximum)."""

    optimizer: str = "adamw"
    """Optimizer of a training."""

    dtype: f.Precision = ""
    """Data type of weights and activations (default: `precision`, else the model's own)."""

    @model_validator(mode="after")
    def _can_be_estimated(self) -> "MemorySpec":
        if not isinstance(self.model, str):
            prefix_field(lambda _: self.estimated("train", 1, ""), None)
        return self

    def estimated(self, task: str, batch_size: int, precision: str) -> MemoryEstimate:
        """Estimate the memory. Raises SpecError while the model is a path, UserError for invalid dimensions."""
        if isinstance(self.model, str):
            remedy = "submit the job as a file, or write the model's dimensions instead of a path"
            raise SpecError("resources.memory.model", f"{self.model} was not read", remedy)
        mode = self.mode or ("training" if task == "train" else "inference")
        dtype, batch = self.dtype or precision or None, self.batch or batch_size or 1
        try:
            return estimate_memory(self.model, batch, self.seq, dtype, mode, self.optimizer)
        except (ArithmeticError, TypeError, ValueError) as e:
            raise UserError(
                f"these are not the dimensions of a transformer: {e}", "write those of the model's config.json"
            ) from e

    def read(self, beside: Path) -> "MemorySpec":
        """Replace the path of a file by the dimensions in it."""
        if not isinstance(self.model, str):
            return self
        path = beside.parent / Path(self.model).expanduser()
        try:
            if path.stat().st_size > FILE_BYTES:
                raise ValueError(f"{path} is larger than {FILE_BYTES >> 20} MiB")
            model = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as e:
            remedy = f"name a JSON file with a transformer's dimensions; the path is relative to {beside}"
            raise SpecError("resources.memory.model", f"cannot be read: {e}", remedy) from e
        if not isinstance(model, dict):
            raise SpecError("resources.memory.model", f"{path} is not a JSON object", "name a model's config.json")
        return validate_model(MemorySpec, self.model_dump() | {"model": model}, f"resources.memory of {beside}")


def _which(value: Any) -> str:
    return "estimate" if isinstance(value, dict | MemorySpec) else "size"


Memory = Annotated[
    Annotated[MemorySpec, Tag("estimate")] | Annotated[f.Size, Tag("size")],
    Discriminator(_which),
]
