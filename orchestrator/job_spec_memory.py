"""How much memory of each device a job needs: a size, or a model from whose numbers it is estimated."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, Tag, model_validator

from cluster.errors import SpecError, UserError
from cluster.validation_errors import prefix_field, validate_model
from orchestrator import job_spec_fields as f
from workers.memory.estimate import MemoryEstimate, estimate_memory

FILE_BYTES = 1 << 20


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


class MemorySpec(Model):
    """What is estimated. Each device holds the whole model; libraries and fragmentation come on top."""

    model: dict[str, Any] | Annotated[str, Field(min_length=1)]
    """A transformer's numbers (hidden_size, num_hidden_layers, vocab_size, num_attention_heads, ...), or the path of a
    JSON file with them, such as the config.json of a model; relative to the job's file."""

    mode: Literal["training", "inference"] | None = None
    """Training for `task: train`, else inference, unless said."""

    batch: Annotated[StrictInt, Field(ge=1)] | None = None
    """Of one device; `batch_size` unless said."""

    seq: Annotated[StrictInt, Field(ge=1)] | None = None
    """Tokens of one sample; as many as the model can take unless said."""

    optimizer: str = "adamw"
    """Of a training."""

    dtype: f.Precision = ""
    """Of weights and activations; `precision` unless said, else the model's own."""

    @model_validator(mode="after")
    def _can_be_estimated(self) -> "MemorySpec":
        if not isinstance(self.model, str):
            prefix_field(lambda _: self.estimated("train", 1, ""), None)
        return self

    def estimated(self, task: str, batch_size: int, precision: str) -> MemoryEstimate:
        """Raises SpecError while the model is a path, UserError for numbers that make no transformer."""
        if isinstance(self.model, str):
            remedy = "submit the job's file, or write the model's numbers themselves"
            raise SpecError("resources.memory.model", f"{self.model} was not read", remedy)
        mode = self.mode or ("training" if task == "train" else "inference")
        dtype, batch = self.dtype or precision or None, self.batch or batch_size or 1
        try:
            return estimate_memory(self.model, batch, self.seq, dtype, mode, self.optimizer)
        except (ArithmeticError, TypeError, ValueError) as e:
            raise UserError(f"these numbers make no transformer: {e}", "give those of its config.json") from e

    def read(self, beside: Path) -> "MemorySpec":
        """With the numbers of the file, if it names one."""
        if not isinstance(self.model, str):
            return self
        path = beside.parent / Path(self.model).expanduser()
        try:
            if path.stat().st_size > FILE_BYTES:
                raise ValueError(f"{path} is larger than {FILE_BYTES >> 20} MiB")
            model = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as e:
            remedy = f"name a JSON file with a transformer's numbers; the path is relative to {beside}"
            raise SpecError("resources.memory.model", f"cannot be read: {e}", remedy) from e
        if not isinstance(model, dict):
            raise SpecError("resources.memory.model", f"{path} holds no mapping", "name a model's config.json")
        return validate_model(MemorySpec, self.model_dump() | {"model": model}, f"resources.memory of {beside}")


def _which(value: Any) -> str:
    return "estimate" if isinstance(value, dict | MemorySpec) else "size"


Memory = Annotated[
    Annotated[MemorySpec, Tag("estimate")] | Annotated[f.Size, Tag("size")],
    Discriminator(_which),
]
