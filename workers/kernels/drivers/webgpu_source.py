"""Compose the WGSL text of a kernel: constants, sources/webgpu_values.wgsl, bindings, and the kernel's own file.

WGSL has neither a preprocessor nor generic functions, and a function cannot get a buffer as an argument. So each array
has functions of its own to load and store values, made from a template in which NAME, BINDING and T are replaced.
"""

import re
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "sources"
OPTIONS = "@group(0) @binding(0) var<uniform> options: Options;"
TREE = re.compile(r"\b(tree_sum|tree_max)\(")


def compose(kernel: str, inputs: Mapping[str, str], outputs: Mapping[str, str], constants: Mapping[str, int]) -> str:
    """Return the text of a kernel. `inputs` and `outputs`: the dtype of each array, as sources name it, by its name.

    Bindings are numbered in the order of both: 0 is the kernel's options. T is the dtype of the first input.
    """
    body = _read(kernel)
    header = [f"const {name}: u32 = {value}u;" for name, value in constants.items()]
    parts = ["\n".join(header), _read("values"), _read("tree") if TREE.search(body) else "", OPTIONS]
    for binding, (name, dtype) in enumerate(inputs.items(), 1):
        parts.append(_declared("input", name, dtype, binding))
    for binding, (name, dtype) in enumerate(outputs.items(), len(inputs) + 1):
        parts.append(_declared("output_32" if dtype == "F32" else "output_16", name, dtype, binding))
    parts.append(body.replace("_T(", f"_{next(iter(inputs.values()))}("))
    return "\n".join(filter(None, parts))


def _declared(template: str, name: str, dtype: str, binding: int) -> str:
    text = _read(template).replace("NAME", name).replace("BINDING", str(binding))
    return re.sub(r"_T\b", f"_{dtype}", text)


def _read(name: str) -> str:
    return (SOURCES / f"webgpu_{name}.wgsl").read_text()
