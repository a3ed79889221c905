"""Contract of kernels: every operation, for arrays of any library, on one device.

A public method does the common work (shapes, dtypes, memory, strides, overlap); an implementation provides short hooks
that get contiguous arrays. Arrays may have more than 2³¹ elements: offsets are 64 bits wide.
"""

from workers.kernels.gradients import Gradients

OPERATIONS = (
    *("matmul", "matmul_vec", "weighted_sum_rows", "rmsnorm", "layernorm", "softmax", "silu", "swiglu", "apply_rope"),
    *("compute_attention_scores", "attention"),
)
"""Methods of KernelBackend that compute. Their backwards are in gradients.py."""


class KernelBackend(Gradients):
    """All operations on one device. The constructor raises KernelsUnavailable if the driver is missing, and UserError
    for a device that these kernels do not support.
    """
