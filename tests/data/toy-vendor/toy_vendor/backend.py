from typing import Any

import torch

from workers.devices.backends.base import BaseBackend
from workers.devices.backends.device_facts import process_memory


class ToyBackend(BaseBackend):
    BACKEND_NAME = "toy"

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    @classmethod
    def count_devices(cls) -> int:
        return 1

    def get_memory_stats(self) -> dict[str, int | None]:
        return process_memory()

    @property
    def collective_backend(self) -> str:
        return "gloo"

    def _device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def _info(self) -> dict[str, Any]:
        return {"device_name": "A toy", "kind": "toy:T1-8GB"}
