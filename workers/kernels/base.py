"""The contract of kernels: every operation, for arrays of any library, on one device.

A public method does the common work (shapes, dtypes, memory, strides, overlap); an implementation fills short hooks
that get contiguous arrays. Sizes may exceed 2³¹ elements: offsets are 64 bits wide.
"""

from workers.kernels.parts.gradients import Gradients

OPERATIONS = (
    *("matmul", "matmul_vec", "weighted_sum_rows", "rmsnorm", "layernorm", "softmax", "silu", "swiglu", "apply_rope"),
    *("compute_attention_scores", "attention"),
)
"""Methods of KernelBackend that compute; those with a backward are in parts/gradients.py."""


class KernelBackend(Gradients):
    """Raises KernelsUnavailable where the driver is absent, UserError for a device it does not compute on."""
