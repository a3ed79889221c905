"""validate(model, kind or back end, sample): will it run there, and what will hurt."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from cluster import catalogue
from cluster.catalogue import EMULATED
from cluster.errors import UserError
from workers.backends.parts.device_transfer import tensors_of
from workers.capability.matrix import Capabilities, capabilities
from workers.memory.estimate import MODES, check_choice, estimate_memory
from workers.optimizers.pass_context import Sample, as_sample
from workers.validation import checks, executed_checks
from workers.validation.operator_trace import Trace, trace
from workers.validation.report import CHECKS, Problem, ValidationReport

if TYPE_CHECKING:
    from workers.backends.base import BaseBackend


def validate(
    model: nn.Module, backend_or_kind: "str | BaseBackend", sample_input: Any, *, mode: str = "inference"
) -> ValidationReport:
    """Findings, and the checks that could not be run with their reasons. The model is only read, or copied.

    `backend_or_kind` is a kind (`tpu:v5e`), a back end's name or alias, or a back end object, whose device is then
    asked. Of a kind that is absent here, what is known comes from documents and from tracing the model on fake tensors.
    `mode` is what memory is estimated for, `inference` or `training`. Raises UserError for what is no Module, a sample
    the model does not take, and an unknown kind.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a model must be a torch.nn.Module, not {type(model).__name__}", "give the module itself")
    check_choice("mode", mode, MODES)
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError("validation needs a sample input", "give what one call of the model takes")
    _refuse_elsewhere(sample)
    can, device = _capabilities(backend_or_kind)
    seen = trace(model, sample)
    if seen.stopped and not seen.needs_values:
        raise UserError(f"the model fails on its sample input: {seen.stopped}", f"see {seen.last or 'its forward'}")
    return _Run(model, sample, can, device, seen, mode).report()


def _refuse_elsewhere(sample: Sample) -> None:
    strangers = {t.device.type for t in tensors_of(sample)} - {"cpu", "meta"}
    if strangers:
        raise UserError(f"the sample input is on {', '.join(sorted(strangers))}", "give it on the CPU")


def _capabilities(backend_or_kind: "str | BaseBackend") -> "tuple[Capabilities, BaseBackend | None]":
    if isinstance(backend_or_kind, str):
        return capabilities(catalogue.require_known_kind(backend_or_kind)), None
    if not hasattr(backend_or_kind, "get_device_info"):
        said = f"{type(backend_or_kind).__name__} is neither a kind nor a back end"
        raise UserError(said, "give a kind such as 'tpu:v5e', a back end's name, or what workers.get_backend returns")
    kind = backend_or_kind.get_device_info(backend_or_kind.device_id).kind
    return capabilities(kind, backend_or_kind), backend_or_kind


class _Run:
    def __init__(
        self, model: nn.Module, sample: Sample, can: Capabilities, device: "BaseBackend | None", seen: Trace, mode: str
    ):
        self.model, self.sample, self.can, self.device, self.seen, self.mode = model, sample, can, device, seen, mode
        self.vendor = catalogue.vendor(can.kind.partition(":")[0])

    def report(self) -> ValidationReport:
        makers: dict[str, Callable[[], list[Problem]]] = {
            "operators": self.operators,
            "dtypes": self.dtypes,
            "dynamic shapes": lambda: checks.dynamic_shapes(self.seen, self.can),
            "custom operators": lambda: checks.custom_operators(self.seen, self.vendor.dispatch_key),
            "lowering": self.lowering,
            "graph breaks": self.graph_breaks,
            "memory": self.memory,
        }
        found: list[Problem] = []
        not_run: dict[str, str] = {}
        for check in CHECKS:
            try:
                found += makers[check]()
            except executed_checks.CheckNotRun as e:
                not_run[check] = str(e)
        if self.seen.stopped:
            cut = f"only up to {self.seen.last}, where tracing needs values"
            not_run |= {c: cut for c in ("operators", "dtypes", "custom operators") if c not in not_run}
        order = {"error": 0, "warning": 1, "info": 2}
        ran = tuple(check for check in CHECKS if check not in not_run)
        return ValidationReport(self.can.kind, tuple(sorted(found, key=lambda p: order[p.level])), ran, not_run)

    def operators(self) -> list[Problem]:
        key = self.vendor.dispatch_key
        if key == "XLA":
            raise executed_checks.CheckNotRun("XLA lowers operators: see the check of the lowering")
        if self.device is None and key != "CPU":
            raise executed_checks.CheckNotRun(f"this build of torch holds no {key} kernels to look for")
        return checks.operators(self.seen, key)

    def dtypes(self) -> list[Problem]:
        if all(known.label == "unknown" for name, known in self.can.dtypes.items() if name != "float32"):
            raise executed_checks.CheckNotRun(
                f"the dtypes of {self.can.kind} are not known: name a model, as in nvidia:A100-80GB"
            )
        return checks.dtypes(self.seen, self.can)

    def lowering(self) -> list[Problem]:
        if self.vendor.dispatch_key != "XLA":
            raise executed_checks.CheckNotRun(f"{self.can.kind} does not compute through XLA")
        if self.vendor.compiler != executed_checks.COMPILER and self.device is None:
            here = f"not checked by {self.vendor.compiler}, which lowers for {self.vendor.backend}"
            raise executed_checks.CheckNotRun(f"{here}: what XLA does on this machine's CPU says nothing of it")
        return executed_checks.lowering(self.model, self._with_values())

    def graph_breaks(self) -> list[Problem]:
        return executed_checks.graph_breaks(self.model, self._with_values())

    def _with_values(self) -> Sample:
        if any(t.device.type == "meta" for t in tensors_of(self.sample)):
            raise executed_checks.CheckNotRun("the sample input has no values: it is on the meta device")
        return self.sample

    def memory(self) -> list[Problem]:
        have = self._memory_bytes()
        try:
            given = self.sample.kwargs or self.sample.args
            needed = estimate_memory(self.model, mode=self.mode, sample_input=given)
        except UserError as e:
            raise executed_checks.CheckNotRun(e.message) from e
        if needed.total_bytes <= have:
            return []
        told = f"{self.mode} needs {needed.total_bytes / 2**30:.2f} GiB, {self.can.kind} has {have / 2**30:.2f}"
        return [Problem("error", "memory", "the model itself", told, "lower batch size or precision, or shard it")]

    def _memory_bytes(self) -> int:
        """Free on a device that is here, all of one that is not."""
        if self.device is not None and (free := self.device.get_memory_stats()["free_bytes"]) is not None:
            return free
        sizes = {row.memory_per_device_bytes for row in catalogue.same_family(self.can.kind)}
        size = sizes.pop() if len(sizes) == 1 else None
        if sizes and size is None:
            listed = ", ".join(row.kind for row in catalogue.same_family(self.can.kind))
            raise executed_checks.CheckNotRun(
                f"{self.can.kind} is sold with several sizes of memory: name one of {listed}"
            )
        if size is None or self.can.kind.endswith(f":{EMULATED}"):
            raise executed_checks.CheckNotRun(f"how much memory {self.can.kind} has is not written down")
        return size
