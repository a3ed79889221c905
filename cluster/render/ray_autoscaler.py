"""Render a YAML file for Ray's cluster launcher (`ray up`) and its autoscaler: one node type per pool.

Ray passes a type's resources and labels to its nodes in variables of `ray start`. The variables of our agents go into a
file that each type's own setup commands write, because the commands that start Ray are the same for all types.
"""

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.errors import SpecError
from cluster.fleet.engine_spec import AutoscalerFleet, AutoscalerPool
from cluster.fleet.fleet_spec import FleetSpec
from cluster.input import strict_yaml
from cluster.render.document import Document, Note, text
from cluster.render.shapes import Shape, missing_field, ray_version, settings, shapes
from cluster.version import VERSION

NEEDED = ("cpus",)
HEAD = "head"
FOLDER = "~/.polyfleet-node"
VARIABLES = f"{FOLDER}/env"
TOKEN = "~/.ray/auth_token"  # noqa: S105 - the path that Ray reads
PORT = 6379


def render(fleet: FleetSpec) -> tuple[str, list[str]]:
    """Return the file, and remarks for the user.

    Raises SpecError, also for fields that Ray's schema refuses.
    """
    launcher = fleet.ray_autoscaler
    if launcher is None or launcher.head is None:
        field = "ray_autoscaler" if launcher is None else "ray_autoscaler.head"
        example = "{provider: {type: aws, region: us-west-2}, head: {node_config: {InstanceType: m7i.xlarge}}}"
        raise missing_field(field, "a cluster-launcher file", f"write e.g. ray_autoscaler: {example}")
    if HEAD in fleet.pools:
        raise SpecError(f"pools.{HEAD}", "is the name of the head's own node type", "rename the pool")
    pool_shapes = shapes(fleet, NEEDED)
    types = {HEAD: _head_type(launcher.head)} | {shape.pool: _type(shape) for shape in pool_shapes}
    document = (
        {Note(_preface(fleet.name)): None, "cluster_name": fleet.name}
        | {
            "max_workers": sum(shape.max_nodes for shape in pool_shapes),
            "idle_timeout_minutes": launcher.idle_timeout_s / 60,
        }
        | {"provider": launcher.provider, "auth": launcher.auth, **_docker(fleet, launcher)}
        | {"available_node_types": types, "head_node_type": HEAD}
        | _files(launcher)
        | _commands(launcher, launcher.head)
    )
    _check_ray_schema(document)
    return text(document), _remarks(fleet)


def _preface(name: str) -> str:
    return f"""Fleet {name}, rendered by Polyfleet {VERSION} for `ray up` of Ray {ray_version()}.

Machines or images must have the same Python, to the patch version, as the machine that runs `ray up`. If a type has no
setup_commands of your own, pip installs Polyfleet {VERSION}. This file contains no secrets.

  umask 077; ray get-auth-token --generate > /dev/null      # once: creates {TOKEN}
  ray up THIS_FILE
  ray attach THIS_FILE
  polyfleet up --address "$(hostname -I | cut -d' ' -f1):{PORT}"      # on that machine

If pools grow, add `-f FLEET_FILE` to the last command: the file that this one was rendered from."""


def _docker(fleet: FleetSpec, launcher: AutoscalerFleet) -> Document:
    """Return Ray's container settings.

    If pools have images, all nodes run in containers, including the head.
    """
    images = {f"pools.{name}.image": pool.image for name, pool in fleet.pools.items()}
    if not any(images.values()):
        return {}
    for field, image in {"ray_autoscaler.head_image": launcher.head_image, **images}.items():
        if not image:
            what = "a fleet whose pools have images"
            raise missing_field(
                field, what, "name an image for each, or for none: Ray runs all nodes in containers, or none"
            )
    options = ["--ulimit nofile=65536:65536", "--shm-size=8g"]
    return {"docker": {"image": launcher.head_image, "container_name": "polyfleet", "run_options": options}}


def _head_type(head: AutoscalerPool) -> Document:
    return {
        "node_config": head.node_config,
        "resources": {"CPU": 0},
        "labels": {"polyfleet.io/role": "head"},
        "min_workers": 0,
        "max_workers": 0,
    }


def _type(shape: Shape) -> Document:
    pool_settings = shape.spec.ray_autoscaler
    field = f"pools.{shape.pool}"
    if pool_settings is None:
        example = "{node_config: {InstanceType: p5.48xlarge}}"
        raise missing_field(
            f"{field}.ray_autoscaler", "this pool", f"write the cloud's name of the machine type, e.g. {example}"
        )
    if shape.hosts > 1:
        raise SpecError(
            f"{field}.topology", f"Ray's launcher starts no slices of {shape.hosts} machines ({shape.spec.topology})",
            "choose a slice of one machine, or use `polyfleet render kuberay` for GKE"
        )  # fmt: skip
    image = {"docker": {"worker_image": shape.spec.image}} if shape.spec.image else {}
    devices = f"{shape.devices} x {shape.kind} per node" if shape.devices else "CPUs"
    return {
        Note(f"\npool {shape.pool}: {devices}"): None,
        "node_config": pool_settings.node_config,
        "resources": shape.resources(),
        "labels": shape.labels(),
        "min_workers": shape.min_nodes,
        "max_workers": shape.max_nodes,
        **image,
        "worker_setup_commands": [*_install_commands(shape, pool_settings), _write_command(_variables(shape))],
    }


def _variables(shape: Shape) -> dict[str, str]:
    return settings() | shape.variables(shape.spec.storage_folder)


def _install_commands(shape: Shape, pool_settings: AutoscalerPool) -> list[str]:
    """Return the installation commands: the user's own if there are any; none for an image; else ours."""
    if pool_settings.setup_commands or shape.spec.image:
        return list(pool_settings.setup_commands)
    requirements = [f"polyfleet=={VERSION}", f"ray=={ray_version()}", *shape.spec.environment.requirements]
    return [f"python3 -m pip install {shlex.join(requirements)}"]


def _write_command(variables: dict[str, str]) -> str:
    """Return a command that writes the variables to the file that the start commands read."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    folder = f'export POLYFLEET_NODE_DIR="$HOME{FOLDER.removeprefix("~")}/node"'
    quoted = " ".join(shlex.quote(line) for line in [*lines, folder])
    return f"umask 077; mkdir -p {FOLDER}; printf '%s\\n' {quoted} > {VARIABLES}"


def _files(launcher: AutoscalerFleet) -> Document:
    return {
        Note("\nRay's token, copied from the machine that runs `ray up`"): None,
        "file_mounts": {TOKEN: launcher.token_file},
        "cluster_synced_files": [],
    }


def _commands(launcher: AutoscalerFleet, head: AutoscalerPool) -> Document:
    """Return the setup and start commands.

    Ray's own defaults have no token, and their dashboard listens on every interface.
    """
    token = f'chmod 600 {TOKEN}; export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME{TOKEN.removeprefix("~")}"'
    prelude = f"ulimit -n 65536; . {VARIABLES}; {token}"
    install = () if launcher.head_image else (f"python3 -m pip install polyfleet=={VERSION} ray=={ray_version()}",)
    setup = list(head.setup_commands) or [*install, *_cloud_setup_commands(str(launcher.provider.get("type", "")))]
    return {
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [*setup, _write_command(settings() | {"RAY_enable_autoscaler_v2": "1"})],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            "ray stop",
            f"{prelude}; ray start --head --port={PORT} --autoscaling-config=~/ray_bootstrap_config.yaml --num-cpus=0"
            " --include-dashboard=false --labels=polyfleet.io/role=head",
        ],
        "worker_start_ray_commands": ["ray stop", f"{prelude}; ray start --address=$RAY_HEAD_IP:{PORT}"],
    }


def _cloud_setup_commands(provider: str) -> list[str]:
    """Return the setup commands of Ray's own file for the cloud.

    They install the cloud's library on the head, where the autoscaler runs.
    """
    ray = _ray()
    defaults = ray / "autoscaler" / provider / "defaults.yaml" if ray and provider.isalpha() else None
    if defaults is None or not defaults.is_file():
        return []
    commands = strict_yaml.load(defaults.read_text(), f"Ray's {provider}/defaults.yaml").get("head_setup_commands")
    return list(commands or [])


def _ray() -> Path | None:
    """Return the folder of the installed Ray, without importing it."""
    spec = find_spec("ray")
    return Path(spec.origin).parent if spec and spec.origin else None


def _check_ray_schema(document: Document) -> None:
    """Check the file against Ray's schema.

    Raises SpecError with Ray's message, e.g. for `provider` or `auth`.
    """
    import jsonschema  # Ray's own dependency, and slow to import

    if (ray := _ray()) is None:
        return
    schema = json.loads((ray / "autoscaler" / "ray-schema.json").read_text())
    plain: Any = {key: value for key, value in document.items() if isinstance(key, str)}
    plain["available_node_types"] = {
        name: {key: value for key, value in kind.items() if isinstance(key, str)}
        for name, kind in plain["available_node_types"].items()
    }
    try:
        jsonschema.validate(plain, schema)
    except jsonschema.ValidationError as e:
        field = ".".join(str(part) for part in e.absolute_path)
        raise SpecError(f"ray_autoscaler.{field}", f"Ray's cluster launcher refuses it: {e.message[:300]}") from None


def _remarks(fleet: FleetSpec) -> list[str]:
    local = [name for name, pool in fleet.pools.items() if not pool.storage]
    if not local:
        return []
    return [
        f"checkpoints of {', '.join(local)} are stored on their machines and are lost with them; "
        "name a shared folder in `storage`"
    ]
