"""WebGPU driver: build kernels from sources/webgpu_*.wgsl, and dispatch them."""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.errors import KernelsFailed
from workers.kernels.drivers.webgpu_device import LOST, REMEDY, Device, is_memory_error, padded_bytes, summary
from workers.kernels.drivers.webgpu_source import compose

if TYPE_CHECKING:
    from workers.kernels.drivers.webgpu_arrays import Array

MAX_GROUPS = 65_535
"""Maximum number of work-groups in one dimension of a dispatch."""
TILE = 64


class Driver(Device):
    """A device with compiled kernels. Dispatches from several threads are serialised."""

    def __init__(self, adapter: Any):
        super().__init__(adapter)
        self._pipelines: dict[tuple[Any, ...], Any] = {}
        self._layouts: dict[tuple[int, int], Any] = {}

    def dispatch(
        self,
        kernel: str,
        groups: int,
        options: tuple[int | float, ...],
        inputs: "Mapping[str, Array]",
        outputs: "Mapping[str, Array]",
    ) -> None:
        """Run `groups` work-groups of a kernel. `options`: the fields of its struct Options after `groups`.

        An output that is also an input is computed in other memory and then copied, because WebGPU binds no memory for
        reading and writing at once.
        """
        read = {one.buffer for one in inputs.values()}
        copies = {name: one.moved(self.allocate(one.nbytes)) for name, one in outputs.items() if one.buffer in read}
        arrays = *inputs.values(), *(dict(outputs) | copies).values()
        with self._calls(*(one.buffer for one in (*arrays, *outputs.values()))) as device:
            pipeline, layout = self._pipeline(device, kernel, inputs, outputs)
            resources = self._uniform(device, (groups, *options)), *map(_binding, arrays)
            entries = [{"binding": n, "resource": one} for n, one in enumerate(resources)]
            encoder = device.create_command_encoder()
            work = encoder.begin_compute_pass()
            work.set_pipeline(pipeline)
            work.set_bind_group(0, device.create_bind_group(layout=layout, entries=entries))
            across = min(groups, MAX_GROUPS)
            work.dispatch_workgroups(across, -(-groups // across))
            work.end()
            for name, one in copies.items():
                to, size = outputs[name], padded_bytes(one.nbytes)
                encoder.copy_buffer_to_buffer(one.buffer.handle, 0, to.buffer.handle, to.start_bytes, size)
            device.queue.submit([encoder.finish()])

    def _uniform(self, device: Any, values: tuple[int | float, ...]) -> dict[str, Any]:
        data = b"".join(bytes(ctypes.c_float(v) if isinstance(v, float) else ctypes.c_uint32(v)) for v in values)
        padded = data.ljust(padded_bytes(len(data)), b"\0")
        handle = device.create_buffer_with_data(data=padded, usage=self.wgpu.BufferUsage.UNIFORM)
        return {"buffer": handle, "offset": 0, "size": len(padded)}

    def _pipeline(
        self, device: Any, kernel: str, inputs: "Mapping[str, Array]", outputs: "Mapping[str, Array]"
    ) -> tuple[Any, Any]:
        layout = self._layout(device, len(inputs), len(outputs))
        read, written = ({name: one.letters for name, one in some.items()} for some in (inputs, outputs))
        key = kernel, self.group, *read.items(), *written.items()
        if key not in self._pipelines:
            text = compose(kernel, read, written, {"GROUP": self.group, "TILE": TILE})
            self._pipelines[key] = self._build(device, kernel, text, layout)
        return self._pipelines[key], layout

    def _build(self, device: Any, kernel: str, text: str, layout: Any) -> Any:
        try:
            module = device.create_shader_module(code=text)
            return device.create_compute_pipeline(
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        except self.wgpu.GPUError as e:
            if LOST in str(e) or is_memory_error(e):
                raise
            reason = f"{self.info['device']} does not build webgpu_{kernel}.wgsl: {summary(e)}"
            raise KernelsFailed("webgpu", reason, REMEDY) from e

    def _layout(self, device: Any, inputs: int, outputs: int) -> Any:
        if (inputs, outputs) not in self._layouts:
            kinds = ["uniform", *["read-only-storage"] * inputs, *["storage"] * outputs]
            stage = self.wgpu.ShaderStage.COMPUTE
            entries = [{"binding": n, "visibility": stage, "buffer": {"type": kind}} for n, kind in enumerate(kinds)]
            self._layouts[inputs, outputs] = device.create_bind_group_layout(entries=entries)
        return self._layouts[inputs, outputs]

    def _forget(self) -> None:
        super()._forget()
        self._pipelines.clear()
        self._layouts.clear()


def _binding(one: "Array") -> dict[str, Any]:
    return {"buffer": one.buffer.handle, "offset": one.start_bytes, "size": padded_bytes(one.nbytes)}
