"""Environment variables of ranks: an allow-list of the node's, then the user's, torchrun's and ours.

rank_variables.py has the last two. Variables that are not on the list are left out, above all Ray's, our home, and any
token.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import workers
from cluster.catalogue import vendor, vendors
from workers.attempt import network_interfaces, rank_variables
from workers.processes.interpreter import interpreter
from workers.protocol.messages import Order

CODE = Path(workers.__file__).absolute().parents[1]
"""The folder that holds our packages."""

NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_CACHE_HOME"}
    | {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
    | {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"POLYFLEET_CPU_ENGINE", "POLYFLEET_NATIVE", "CXX"}
)
PREFIXES = ("LC_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Prefixes for language, network and torch; those of vendors are in the catalogue."""
POOL_VARIABLES = "POLYFLEET_POOL_VARIABLES"
"""Variable with the comma-separated names of what the fleet file sets for a pool's nodes.

Its value comes from cluster/nodes/raylets.py.
"""

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE|AUTH", re.IGNORECASE)

TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1"}


def allowed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The node's variables that a rank may see, and all that its pool declares.

    Without proxies that have a password.
    """
    prefixes = (*PREFIXES, *(prefix for row in vendors().values() for prefix in row.variables))
    allowed = {k: v for k, v in environ.items() if (k in NAMES or k.startswith(prefixes)) and not SECRET_NAME.search(k)}
    allowed = {k: v for k, v in allowed.items() if not (k.lower().endswith("_proxy") and "@" in v)}
    allowed |= {name: environ[name] for name in environ.get(POOL_VARIABLES, "").split(",") if name in environ}
    search = [str(Path(interpreter(environ)).parent), allowed.get("PATH", os.defpath)]
    return allowed | {"PATH": os.pathsep.join(search)}


def supervisor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a supervisor: next to nothing, as any process of the same user can read it."""
    return {"PATH": environ.get("PATH", os.defpath), "PYTHONPATH": str(CODE), "LC_ALL": "C.UTF-8"}


def rank_environment(
    order: Order,
    local_rank: int,
    folder: Path,
    threads: int,
    environ: Mapping[str, str],
    *,
    has_torch_xla: bool = False,
    interface: str = "",
) -> dict[str, str]:
    """All variables of one rank. `folder` is where the attempt's ranks write.

    The order's checkpoint folders must be absolute. `interface` is the one at which other nodes reach this one.
    """
    defaults = _defaults(order, threads) | rank_variables.defaults(order, has_torch_xla=has_torch_xla)
    defaults |= network_interfaces.variables(order, interface)
    node = {name: value for name, value in allowed_variables(environ).items() if not rank_variables.is_torchruns(name)}
    ours = rank_variables.torchrun(order, local_rank) | rank_variables.polyfleet(order, local_rank, folder)
    fixed = ours | visible_devices(order, local_rank) | {"PYTHONPATH": _python_path(order, local_rank, folder)}
    return defaults | node | order.environment | fixed


def _defaults(order: Order, threads: int) -> dict[str, str]:
    """Defaults of ours for threads, Python and the compiler.

    torch-xla and IPEX import torch's compiler at once, which starts a process that imports torch, too. With one compile
    thread it does not, and their ranks start 1.5 s sooner and end 3 s sooner (2 cores, torch 2.8).
    """
    lean = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if order.backend == "tpu" or order.kind == "cpu:ipex" else {}
    python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {"OMP_NUM_THREADS": str(threads)} | python | lean


def _python_path(order: Order, local_rank: int, folder: Path) -> str:
    """Build PYTHONPATH.

    A command finds its own folder first; a task of ours needs our code, and adds the user's folder.
    """
    work = folder / "work" / str(rank_variables.work_rank(order, local_rank))
    own_folder = work if order.task == "run" else CODE
    return os.pathsep.join(filter(None, (str(own_folder), order.environment.get("PYTHONPATH", ""))))


def visible_devices(order: Order, local_rank: int) -> dict[str, str]:
    """Variables for the devices that a rank sees: one of the allocated for `train`, else all of them."""
    row = vendor(order.backend)
    if order.emulated or not row.visibility:
        return {}
    allocated = order.devices[local_rank : local_rank + 1] if order.task == "train" else order.devices
    variables = {row.visibility: ",".join(order.visibility_names.get(str(number), str(number)) for number in allocated)}
    # By default the CUDA runtime numbers the fastest GPU first, but NVML and Level Zero's sysfs use PCI order.
    variables |= dict(setting.split("=", 1) for setting in row.device_order)
    if order.backend == "tpu" and len(allocated) in TPU_BOUNDS:
        variables |= {"TPU_CHIPS_PER_HOST_BOUNDS": TPU_BOUNDS[len(allocated)], "TPU_HOST_BOUNDS": "1,1,1"}
    return variables


def threads_per_rank(cores: int, devices_of_node: int, order: Order) -> int:
    """Threads of each rank, at least 1: cores in proportion to the order's devices, split among its ranks."""
    share = cores * len(order.devices) / max(devices_of_node, len(order.devices), 1)
    return max(1, int(share) // max(order.ranks, 1))
