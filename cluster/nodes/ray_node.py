"""Command line and environment of a Ray node of an embedded fleet. Pure functions.

Reasons for the settings: Ray 2.60's defaults detect a frozen node only after a minute, and kill every job when the head
is away for a minute. The memory monitor counts the memory of the entire host, which others use too. Usage statistics
would leave the machine. The head would learn of freed resources 0.1 s late, and the next job on a device would wait for
that. Nodes of one fleet may have different patch releases of one Python; another minor version is refused, since it
ends in a crash.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.catalogue import ray_resource, vendors
from cluster.host import copy_rate

SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_report_resources_period_milliseconds": "10",
    "RAY_START_HOOK": "cluster.nodes.ray_start_hook.prepare_node",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}

OBJECT_STORE_BYTES = 128 << 20
NOT_INHERITED = ("RAY_", "POLYFLEET_", "PYTHON", "VIRTUAL_ENV", "CONDA_")
OWN_VARIABLES = ("POLYFLEET_CACHE", copy_rate.SETTING)


def visibility_settings() -> dict[str, str]:
    """Return the variables that make Ray leave every vendor's visibility variable to us."""
    return {f"RAY_EXPERIMENTAL_NOSET_{row.visibility}": "1" for row in vendors().values() if row.visibility}


def token_environment(token_path: Path | None) -> dict[str, str]:
    """Return Ray's authentication variables.

    They are always explicit, because Ray's default depends on files in the user's home (2.59).
    """
    if token_path is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}


def tls_environment(tls_dir: str) -> dict[str, str]:
    """Return Ray's variables for TLS with certificates of the fleet's own authority only.

    Empty if `tls_dir` is "".
    """
    if not tls_dir:
        return {}
    folder = Path(tls_dir)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "node.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "node.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
    }


def inherited_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the caller's environment without variables of another Ray, fleet or interpreter."""
    variables = os.environ if base is None else base
    return {k: v for k, v in variables.items() if not k.startswith(NOT_INHERITED) or k in OWN_VARIABLES}


def node_environment(
    token_path: Path, code: Path, ports: Mapping[str, int], extra: Mapping[str, str]
) -> dict[str, str]:
    """Return a node's environment.

    `code` is the folder with our packages, `ports` are free ports for Ray's listeners.
    """
    metrics = {"AUTOSCALER_METRIC_PORT": str(ports["autoscaler"]), "DASHBOARD_METRIC_PORT": str(ports["dashboard"])}
    return (
        inherited_environment()
        | SETTINGS
        | visibility_settings()
        | metrics
        | token_environment(token_path)
        | {"PYTHONPATH": str(code)}
        | dict(extra)
    )


def _start(interpreter: Path) -> list[str]:
    return [str(interpreter), "-m", "ray.scripts.scripts", "start", "--block", "--include-log-monitor=false",
            f"--object-store-memory={OBJECT_STORE_BYTES}", "--dashboard-agent-listen-port=0"]  # fmt: skip


def head_command(interpreter: Path, port: int, temp_dir: Path) -> list[str]:
    """Return the command that starts the head. It has zero CPUs, so that it runs no work."""
    return [*_start(interpreter), "--head", f"--port={port}", f"--temp-dir={temp_dir}", "--num-cpus=0", "--num-gpus=0",
            "--include-dashboard=false", "--no-monitor", "--labels=polyfleet.io/role=head"]  # fmt: skip


def worker_command(interpreter: Path, address: str, labels: Mapping[str, str], counts: Mapping[str, int]) -> list[str]:
    """Return the command that starts a worker node. `counts` maps Ray resource names to numbers.

    The counts are explicit, so that Ray does not search for devices itself.
    """
    custom_counts = {k: v for k, v in counts.items() if k not in ("CPU", "GPU")}
    custom = "{" + ", ".join(f'"{k}": {v}' for k, v in custom_counts.items()) + "}"
    label_list = ",".join(f"{key}={value}" for key, value in labels.items())
    return [*_start(interpreter), f"--address={address}", f"--num-cpus={counts['CPU']}",
            f"--num-gpus={counts.get('GPU', 0)}", f"--resources={custom}", f"--labels={label_list}"]  # fmt: skip


def resource_counts(backend: str, devices: int, cpus: int, emulated: bool) -> dict[str, int]:
    """Return the Ray resources of a node: its CPUs, and the backend's own resource once per device."""
    resource = ray_resource(backend, emulated)
    return {"CPU": cpus} if resource == "CPU" else {"CPU": cpus, resource: devices}
