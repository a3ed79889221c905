"""Validate a model for a kind of device or a backend: will it run there, and what will be slow."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from cluster import catalogue
from cluster.catalogue import EMULATED
from cluster.errors import UserError
from workers.devices.backends.device_transfer import tensors_of
from workers.measurement.inputs import Sample, as_sample
from workers.models.memory.estimate import MODES, check_choice, estimate_memory
from workers.models.validation import checks, executed_checks
from workers.models.validation.matrix import Capabilities, capabilities
from workers.models.validation.operator_trace import OperatorTrace, trace
from workers.models.validation.report import CHECKS, Problem, ValidationReport

if TYPE_CHECKING:
    from workers.devices.backends.base import BaseBackend


def validate(
    model: nn.Module, backend_or_kind: "str | BaseBackend", sample_input: Any, *, mode: str = "inference"
) -> ValidationReport:
    """Check whether `model` runs on a kind of device. Only reads or copies the model.

    `backend_or_kind` is a kind (`tpu:v5e`), a backend's name or alias, or a backend object, which probes its device.
    For a kind that is absent here, the checks use documented facts and a trace of the model on fake tensors. `mode`,
    `inference` or `training`, applies to the memory estimate. Raises UserError for a model that is not a Module, a
    sample on which the model fails, and an unknown kind.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"a model must be a torch.nn.Module, not {type(model).__name__}", "give the module itself")
    check_choice("mode", mode, MODES)
    sample = as_sample(sample_input)
    if sample is None:
        raise UserError("validation needs a sample input", "give the arguments of one call of the model")
    _check_sample_device(sample)
    device_capabilities, device = _capabilities(backend_or_kind)
    traced = trace(model, sample)
    if traced.stopped and not traced.needs_values:
        raise UserError(f"the model fails on its sample input: {traced.stopped}", f"see {traced.last or 'its forward'}")
    return _Run(model, sample, device_capabilities, device, traced, mode).report()


def _check_sample_device(sample: Sample) -> None:
    other_devices = {t.device.type for t in tensors_of(sample)} - {"cpu", "meta"}
    if other_devices:
        raise UserError(f"the sample input is on {', '.join(sorted(other_devices))}", "pass it on the CPU")


def _capabilities(backend_or_kind: "str | BaseBackend") -> "tuple[Capabilities, BaseBackend | None]":
    if isinstance(backend_or_kind, str):
        return capabilities(catalogue.resolve_kind(backend_or_kind)), None
    if not hasattr(backend_or_kind, "get_device_info"):
        message = f"{type(backend_or_kind).__name__} is neither a kind nor a backend"
        raise UserError(
            message, "give a kind such as 'tpu:v5e', a backend's name, or a backend from workers.get_backend"
        )
    kind = backend_or_kind.get_device_info(backend_or_kind.device_id).kind
    return capabilities(kind, backend_or_kind), backend_or_kind


class _Run:
    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        device_capabilities: Capabilities,
        device: "BaseBackend | None",
        traced: OperatorTrace,
        mode: str,
    ):
        self.model, self.sample, self.capabilities, self.device, self.traced, self.mode = (
            model,
            sample,
            device_capabilities,
            device,
            traced,
            mode,
        )
        self.vendor = catalogue.vendor(device_capabilities.kind.partition(":")[0])

    def report(self) -> ValidationReport:
        runners: dict[str, Callable[[], list[Problem]]] = {
            "operators": self.operators,
            "dtypes": self.dtypes,
            "dynamic shapes": lambda: checks.dynamic_shapes(self.traced, self.capabilities),
            "custom operators": lambda: checks.custom_operators(self.traced, self.vendor.dispatch_key),
            "lowering": self.lowering,
            "graph breaks": self.graph_breaks,
            "memory": self.memory,
        }
        findings: list[Problem] = []
        not_run: dict[str, str] = {}
        for check in CHECKS:
            try:
                findings += runners[check]()
            except executed_checks.CheckNotRun as e:
                not_run[check] = str(e)
        if self.traced.stopped:
            partial = f"checked only up to {self.traced.last}, where tracing needs values"
            not_run |= {c: partial for c in ("operators", "dtypes", "custom operators") if c not in not_run}
        order = {"error": 0, "warning": 1, "info": 2}
        completed = tuple(check for check in CHECKS if check not in not_run)
        return ValidationReport(
            self.capabilities.kind, tuple(sorted(findings, key=lambda p: order[p.level])), completed, not_run
        )

    def operators(self) -> list[Problem]:
        key = self.vendor.dispatch_key
        if key == "XLA":
            raise executed_checks.CheckNotRun("XLA lowers operators: see the check `lowering`")
        if self.device is None and key != "CPU":
            raise executed_checks.CheckNotRun(f"this build of torch has no {key} kernels to check")
        return checks.operators(self.traced, key)

    def dtypes(self) -> list[Problem]:
        if all(support.label == "unknown" for name, support in self.capabilities.dtypes.items() if name != "float32"):
            raise executed_checks.CheckNotRun(
                f"the dtypes of {self.capabilities.kind} are unknown: give a model, such as nvidia:A100-80GB"
            )
        return checks.dtypes(self.traced, self.capabilities)

    def lowering(self) -> list[Problem]:
        if self.vendor.dispatch_key != "XLA":
            raise executed_checks.CheckNotRun(f"{self.capabilities.kind} does not compute through XLA")
        if self.vendor.compiler != executed_checks.COMPILER and self.device is None:
            requirement = f"this check needs a {self.vendor.backend} device, for which {self.vendor.compiler} lowers"
            raise executed_checks.CheckNotRun(f"{requirement}: XLA on this machine's CPU lowers differently")
        return executed_checks.lowering(self.model, self._with_values())

    def graph_breaks(self) -> list[Problem]:
        return executed_checks.graph_breaks(self.model, self._with_values())

    def _with_values(self) -> Sample:
        if any(t.device.type == "meta" for t in tensors_of(self.sample)):
            raise executed_checks.CheckNotRun("the sample input has no values: it is on the meta device")
        return self.sample

    def memory(self) -> list[Problem]:
        available = self._memory_bytes()
        try:
            arguments = self.sample.kwargs or self.sample.args
            needed = estimate_memory(self.model, mode=self.mode, sample_input=arguments)
        except UserError as e:
            raise executed_checks.CheckNotRun(e.message) from e
        if needed.total_bytes <= available:
            return []
        needed_gib, available_gib = needed.total_bytes / 2**30, available / 2**30
        message = f"{self.mode} needs {needed_gib:.2f} GiB, {self.capabilities.kind} has {available_gib:.2f}"
        return [Problem("error", "memory", "the model itself", message, "lower batch size or precision, or shard it")]

    def _memory_bytes(self) -> int:
        """Free bytes of a device that is present, total bytes of a kind that is not."""
        if self.device is not None and (free := self.device.get_memory_stats()["free_bytes"]) is not None:
            return free
        sizes = {row.memory_per_device_bytes for row in catalogue.same_family(self.capabilities.kind)}
        size = sizes.pop() if len(sizes) == 1 else None
        if sizes and size is None:
            listed = ", ".join(row.kind for row in catalogue.same_family(self.capabilities.kind))
            raise executed_checks.CheckNotRun(
                f"{self.capabilities.kind} is sold with several sizes of memory: give one of {listed}"
            )
        if size is None or self.capabilities.kind.endswith(f":{EMULATED}"):
            raise executed_checks.CheckNotRun(f"the catalogue has no memory size for {self.capabilities.kind}")
        return size
