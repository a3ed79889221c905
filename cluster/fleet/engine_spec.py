"""Fields of a fleet file for engines that start its nodes, in the terms of those engines.

Rendering for one engine ignores the fields of the others, and refuses a file without its own
(cluster/render/shapes.py).
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from cluster.catalogue import resolve_kind
from cluster.input.validation_errors import WrongValueError, prefix_field

IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,510}")
TOPOLOGY = re.compile(r"[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,2}")
SIZE = re.compile(r"([1-9][0-9]{0,8})(K|M|G|T)(i?)B?")
KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
QUALIFIED = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
SLURM_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:=@*&|()\[\]+-]{0,255}")
SLURM_TIME = re.compile(r"[0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]{1,2}(:[0-9]{2}){0,2}|UNLIMITED")
FOLDER = re.compile(r"(/[A-Za-z0-9._+-]+)+")
MAX_MAPPING_BYTES = 16 << 10
SECRET_KEYS = {"gcp_credentials", "aws_credentials", "aws_secret_access_key", "aws_session_token", "password"}
"""Keys of Ray's providers that hold secrets: their values would be in a file that users read and commit."""


def _matching(pattern: re.Pattern[str], what: str, remedy: str) -> AfterValidator:
    def check(value: str) -> str:
        if value and not pattern.fullmatch(value):
            raise WrongValueError(f"{value[:100]!r} is not {what}", remedy)
        return value

    return AfterValidator(check)


def split_accelerators(text: str) -> tuple[str, int]:
    """Parse `nvidia:H100-80GB:8`, `H100:8` or `H100` as (kind, count per node).

    Raises UserError for an unknown kind.
    """
    kind, colon, count = text.rpartition(":")
    if colon and count.isascii() and count.isdigit():
        return resolve_kind(kind), int(count)
    return resolve_kind(text), 1


def _accelerators(value: str) -> str:
    kind, count = prefix_field(split_accelerators, value)
    if kind == "cpu" or not 1 <= count <= 256:
        message = (
            "a CPU is not an accelerator" if kind == "cpu" else f"{count} accelerators in one node are not possible"
        )
        raise WrongValueError(
            message, "write kind and count (1 to 256) per node, e.g. nvidia:H100-80GB:8; leave the field out for CPUs"
        )
    return f"{kind}:{count}"


def _from_mapping(value: Any) -> Any:
    """Accept {H100: 8}, SkyPilot's other form, as `H100:8`."""
    if isinstance(value, dict) and len(value) == 1:
        return ":".join(str(part) for pair in value.items() for part in pair)
    return value


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as `1800GB` or `512GiB`. Raises WrongValueError."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise WrongValueError(f"{text[:100]!r} is not a size", "write a number and a unit, e.g. 64GB or 64GiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(number) * int(base ** ("KMGT".index(unit) + 1))


def _size(value: str) -> str:
    size_bytes(value)
    return value


def _engine_mapping(value: dict[str, Any]) -> dict[str, Any]:
    """Check a mapping that is copied to an engine's file: small and without secrets."""
    size = len(json.dumps(value).encode())
    if size > MAX_MAPPING_BYTES:
        raise WrongValueError(f"is {size} bytes long, at most {MAX_MAPPING_BYTES} are allowed", "shorten it")
    if secrets := sorted(SECRET_KEYS & set(_keys(value))):
        raise WrongValueError(
            f"{secrets[0]!r} would be in the rendered file", "leave it out: Ray reads the cloud's own login files"
        )
    return value


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    return [key for inner in value for key in _keys(inner)] if isinstance(value, list) else []


Image = Annotated[str, _matching(IMAGE, "an image", "write it as for `docker pull`, e.g. registry/name:tag")]
KubernetesName = Annotated[str, _matching(KUBERNETES_NAME, "a Kubernetes name", "use a-z, 0-9, `-` and `.`")]
Qualified = Annotated[str, _matching(QUALIFIED, "a Kubernetes label key", "write it as PREFIX/NAME")]
LabelValue = Annotated[str, _matching(LABEL_VALUE, "a label value", "use up to 63 letters, digits, `-`, `_`, `.`")]
SlurmValue = Annotated[
    str, _matching(SLURM_VALUE, "a value of an sbatch option", "write it as for `sbatch`, without spaces or quotes")
]
Size = Annotated[str, AfterValidator(_size)]
PositiveInteger = Annotated[int, Field(strict=True, ge=1, le=4096)]
EngineMapping = Annotated[dict[str, Any], AfterValidator(_engine_mapping)]
Command = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00\r\n]+$")]
Selector = dict[Qualified, LabelValue]


class Toleration(BaseModel, extra="forbid", frozen=True):
    """A toleration, as in a pod."""

    key: Qualified = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelValue = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


Tolerations = Annotated[tuple[Toleration, ...], Field(max_length=32)]


class KubernetesPool(BaseModel, extra="forbid", frozen=True):
    """Settings of a pool's pods."""

    node_selector: Selector | None = Field(
        default=None, description="Labels of their nodes (default: those of the catalogue; {}: none)"
    )
    tolerations: Tolerations = Field(default=(), description="Tolerations in addition to that of the vendor's taint")
    resource: Qualified = Field(
        default="", description="Resource of the device plugin, if it is not the usual one, e.g. gpu.intel.com/i915"
    )
    service_account: KubernetesName = Field(
        default="", description="Service account of the pods; its token is then mounted for jobs too"
    )


class KubernetesHead(BaseModel, extra="forbid", frozen=True):
    """Settings of the pod with Ray's head and Polyfleet's server. It runs no jobs."""

    image: Image = Field(description="Image with Ray and Polyfleet")
    cpus: PositiveInteger = 2
    memory: Size = "8GB"
    home_claim: KubernetesName = Field(
        default="",
        description="PersistentVolumeClaim of the home, so that jobs outlive the pod (default: they end with it)",
    )
    node_selector: Selector = {}
    tolerations: Tolerations = ()


class KubernetesFleet(BaseModel, extra="forbid", frozen=True):
    """Settings for `polyfleet render kuberay`."""

    namespace: KubernetesName = "default"
    head: KubernetesHead | None = None
    image_pull_secrets: Annotated[tuple[KubernetesName, ...], Field(max_length=16)] = Field(
        default=(), description="Names of Secrets with registry credentials"
    )
    token_secret: KubernetesName = Field(
        default="", description="Secret with Ray's token under the key auth_token (default: KubeRay creates one)"
    )
    storage_claim: KubernetesName = Field(
        default="", description="PersistentVolumeClaim (ReadWriteMany) for the checkpoints of all pools"
    )
    fs_group: Annotated[int, Field(strict=True, ge=0, lt=1 << 31)] | None = Field(
        default=None, description="Group that may write to claims, if images do not run as root"
    )
    idle_timeout_s: PositiveInteger = Field(
        default=300, description="Seconds after which an idle node above min_nodes is released"
    )


class AutoscalerPool(BaseModel, extra="forbid", frozen=True):
    """Settings of a pool's machines."""

    node_config: EngineMapping = Field(
        description="Machine type in the cloud's terms, e.g. {InstanceType: p5.48xlarge}"
    )
    setup_commands: Annotated[tuple[Command, ...], Field(max_length=64)] = Field(
        default=(), description="Commands to run instead of those that install Polyfleet and the pool's requirements"
    )


class AutoscalerFleet(BaseModel, extra="forbid", frozen=True):
    """Settings for `polyfleet render ray-autoscaler`."""

    provider: EngineMapping = Field(
        description="Provider as in Ray's cluster launcher, e.g. {type: aws, region: us-west-2}"
    )
    auth: EngineMapping = Field(default={}, description="Login as in Ray's cluster launcher, e.g. {ssh_user: ubuntu}")
    head: AutoscalerPool | None = Field(default=None, description="Machine of Ray's head, which runs no jobs")
    head_image: Image = Field(default="", description="Image of the head; required if pools have images")
    token_file: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]+$")] = Field(
        default="~/.ray/auth_token", description="File of Ray's token on the machine that runs `ray up`"
    )
    idle_timeout_s: PositiveInteger = Field(
        default=300, description="Seconds after which an idle node above min_nodes is released"
    )


class SlurmPool(BaseModel, extra="forbid", frozen=True):
    """Options of sbatch for a pool's nodes."""

    partition: SlurmValue = ""
    constraint: SlurmValue = ""
    gres: SlurmValue = Field(default="", description="Generic resources, if not gpu:COUNT, e.g. gpu:h100:8")


class SlurmFleet(BaseModel, extra="forbid", frozen=True):
    """Settings for `polyfleet render slurm`."""

    folder: Annotated[
        str, _matching(FOLDER, "a plain absolute path", "write a path from / with letters, digits and `._+-`")
    ] = Field(description="Folder shared by all nodes and readable by you alone, for token, jobs, checkpoints and logs")
    time: Annotated[str, _matching(SLURM_TIME, "a Slurm time", "write e.g. 12:00:00 or 2-00:00:00")] = Field(
        default="", description="Time limit of the Slurm job; jobs continue in the next one"
    )
    account: SlurmValue = ""
    qos: SlurmValue = ""
    reservation: SlurmValue = ""


Accelerators = Annotated[
    str,
    BeforeValidator(_from_mapping),
    AfterValidator(_accelerators),
    Field(description="Kind and count per node, e.g. nvidia:H100-80GB:8 (`render`)"),
]
Topology = Annotated[
    str,
    _matching(TOPOLOGY, "a topology", "write the chips per dimension, e.g. 4x4 or 2x2x4"),
    Field(description="Topology of a TPU slice, e.g. 4x4; its nodes start and stop together (`render`)"),
]
MinNodes = Annotated[int, Field(strict=True, ge=0, le=4096, description="Minimum number of nodes (`render`)")]
MaxNodes = Annotated[int, Field(strict=True, ge=1, le=4096, description="Maximum number of nodes (`render`)")]
Cpus = Annotated[int, Field(strict=True, ge=1, le=4096, description="CPUs per node (`render`)")]
Memory = Annotated[Size, Field(description="Memory per node, e.g. 1800GB (`render`)")]
PoolImage = Annotated[Image, Field(description="Container image with Ray, Polyfleet and the vendor's torch (`render`)")]
Spot = Annotated[bool, Field(strict=True, description="Use spot machines, which the cloud may take away (`render`)")]
