"""The few calls into torch_xla that checkpoints need; it is imported on first use."""

import torch


def to_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors in one synchronisation and one transfer. Unlike mark_step it leaves the random stream as it is."""
    import torch_xla

    torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=True, sync_xla_data=False)
    cpu: list[torch.Tensor] = torch_xla._XLAC._xla_get_cpu_tensors(tensors)
    return cpu


def wait_device_ops() -> None:
    """Execute pending writes to live tensors, so that the first training step compiles only itself."""
    import torch_xla

    torch_xla.sync(wait=True)


def get_rng_state() -> int:
    import torch_xla.core.xla_model as xm

    return int(xm.get_rng_state())


def set_rng_state(state: int) -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(state)
