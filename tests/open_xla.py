"""A plugin of pytest that makes the first device of torch-xla before any test runs.

torch counts the devices at the first backward pass of a process, on the CPU too. A backward pass on an XLA device that
was made later ends in an internal assertion (torch 2.8).
"""

import torch_xla

torch_xla.device()
