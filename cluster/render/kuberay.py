"""Render a RayCluster for KubeRay 1.7, and a ConfigMap with the settings of all pods.

Each pool is a worker group. KubeRay's operator and Ray's autoscaler both derive a group's resources, and neither
supports every vendor's. They are therefore explicit, in the group's `resources`, and must not be in rayStartParams too.
The labels are in the group as well.
"""

from cluster import catalogue
from cluster.errors import SpecError
from cluster.fleet.engine_spec import KubernetesFleet, KubernetesHead, KubernetesPool, Tolerations, size_bytes
from cluster.fleet.fleet_spec import FleetSpec
from cluster.render.document import Document, Note, text
from cluster.render.shapes import Shape, missing_field, other_storages, ray_version, settings, shapes, storages
from cluster.version import VERSION

NEEDED = ("cpus", "memory", "image")
HOME, STORAGE, TOKEN = "/polyfleet", "/polyfleet-storage", "/polyfleet-token"
TPU_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
SPOT = {
    "cloud.google.com/": {"cloud.google.com/gke-spot": "true"},
    "node.kubernetes.io/instance-type": {"eks.amazonaws.com/capacityType": "SPOT"},
}
"""Labels of a cloud's spot machines, by the beginning of the catalogue's selector for that cloud."""
GRACE_S = 60
"""Grace period of a pod. Attempts have 30 s of it to save (cluster/host/termination_notice.py)."""


def render(fleet: FleetSpec) -> tuple[str, list[str]]:
    """Return the file, and remarks for the user. Raises SpecError."""
    kubernetes = fleet.kubernetes or KubernetesFleet()
    if kubernetes.head is None:
        raise missing_field("kubernetes.head", "a RayCluster", "write e.g. {image: registry/polyfleet:tag}")
    if not fleet.name[0].isalpha() or fleet.name.endswith("-"):
        raise SpecError("name", f"{fleet.name!r} cannot be a RayCluster's name", "begin with a letter, end without `-`")
    pool_shapes = shapes(fleet, NEEDED)
    groups = [_group(shape, fleet, kubernetes) for shape in pool_shapes]
    grows = any(shape.grows for shape in pool_shapes)
    spec = (
        {"rayVersion": ray_version(), "authOptions": _authentication(kubernetes)}
        | (_autoscaler(kubernetes) if grows else {"enableInTreeAutoscaling": False})
        | {"headGroupSpec": _head(fleet.name, kubernetes, kubernetes.head), "workerGroupSpecs": groups}
    )
    metadata = {"name": fleet.name, "namespace": kubernetes.namespace, "labels": {"polyfleet.io/fleet": fleet.name}}
    common = settings() | {"POLYFLEET_HOME": f"{HOME}/home"}
    preface = {Note(_preface(fleet.name, kubernetes)): None}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata | {"name": _config(fleet.name)}}
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
    data = {"data": dict(sorted(common.items()))}
    return text(preface | config | data, cluster), _remarks(kubernetes, pool_shapes)


def _config(fleet: str) -> str:
    return f"{fleet}-settings"


def _preface(name: str, kubernetes: KubernetesFleet) -> str:
    namespace = kubernetes.namespace
    return f"""Fleet {name}, rendered by Polyfleet {VERSION} for KubeRay 1.7 or newer.

Every image must have the same Python, to the patch version, with polyfleet=={VERSION} and
ray[default]=={ray_version()}: without `default`, KubeRay's probes fail and end the pods.
The image of a pool also needs its vendor's torch. This file contains no secrets.

  kubectl apply -f THIS_FILE
  kubectl -n {namespace} exec -it $(kubectl -n {namespace} get pod -o name \\
    -l ray.io/cluster={name},ray.io/node-type=head) -c ray-head -- bash
  polyfleet up --address "$(hostname -i):6379"      # in that pod; if pools grow, add `-f FLEET_FILE`"""


def _authentication(kubernetes: KubernetesFleet) -> Document:
    secret = kubernetes.token_secret
    note = f"the token is in Secret {secret}, key auth_token" if secret else "KubeRay creates the token's Secret"
    return {Note(note): None, "mode": "token"} | ({"secretName": secret} if secret else {})


def _autoscaler(kubernetes: KubernetesFleet) -> Document:
    options = {"version": "v2", "idleTimeoutSeconds": kubernetes.idle_timeout_s}
    return {"enableInTreeAutoscaling": True, "autoscalerOptions": options}


def _head(name: str, kubernetes: KubernetesFleet, head: KubernetesHead) -> Document:
    """Return the head's group.

    Its dashboard listens on loopback only, and the Service has only Ray's port.
    """
    secret = kubernetes.token_secret or name
    variables = {"RAY_AUTH_TOKEN_PATH": f"{TOKEN}/auth_token"}
    volume_claim = head.home_claim
    home = {"persistentVolumeClaim": {"claimName": volume_claim}} if volume_claim else {"emptyDir": {}}
    warning = (
        {} if volume_claim else {Note("jobs end with this pod; to keep them, set kubernetes.head.home_claim"): None}
    )
    volumes: list[Document] = [
        {"name": "polyfleet"} | warning | home,
        {"name": "ray-token", "secret": {"secretName": secret}},
    ]
    mounts = [_mount("polyfleet", HOME), _mount("ray-token", TOKEN) | {"readOnly": True}]
    container = _container("ray-head", head.image, name, variables) | {
        "ports": [{"containerPort": 6379, "name": "gcs-server"}],
        "resources": _amounts({"cpu": str(head.cpus), "memory": _quantity(size_bytes(head.memory))}),
        "volumeMounts": mounts + _shared_mounts(kubernetes),
    }
    pod = _pod(container, volumes + _shared_volumes(kubernetes), kubernetes)
    pod |= _placement(dict(head.node_selector), _tolerations(head.tolerations))
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "127.0.0.1"},
        "labels": {"polyfleet.io/role": "head"},
        "template": {"spec": pod},
    }


def _group(shape: Shape, fleet: FleetSpec, kubernetes: KubernetesFleet) -> Document:
    slices = {"numOfHosts": shape.hosts} if shape.spec.topology else {}
    scale = {Note(f"slices {shape.spec.topology} of {shape.hosts} nodes"): None} if shape.hosts > 1 else {}
    return {
        Note(f"\npool {shape.pool}: {_device_text(shape)}"): None,
        "groupName": shape.pool,
        **scale,
        "replicas": shape.min_nodes // shape.hosts,
        "minReplicas": shape.min_nodes // shape.hosts,
        "maxReplicas": shape.max_nodes // shape.hosts,
        **slices,
        "rayStartParams": {},
        "labels": shape.labels(),
        "resources": {name: str(count) for name, count in shape.resources().items()},
        "template": {"spec": _worker(shape, fleet, kubernetes)},
    }


def _device_text(shape: Shape) -> str:
    return f"{shape.devices} x {shape.kind} per node" if shape.devices else "CPUs"


def _worker(shape: Shape, fleet: FleetSpec, kubernetes: KubernetesFleet) -> Document:
    pool_settings, pool = shape.spec.kubernetes or KubernetesPool(), shape.spec
    limits = {"cpu": str(pool.cpus), "memory": _quantity(shape.memory_bytes)}
    if shape.devices:
        limits[_device_resource(shape, pool_settings)] = str(shape.devices)
    container = _container("ray-worker", pool.image, fleet.name, _variables(shape, fleet, kubernetes)) | {
        "resources": _amounts(limits),
        "volumeMounts": [_mount("polyfleet", HOME), *_shared_mounts(kubernetes)],
        Note("jobs save before the pod ends"): None,
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "cluster.host.termination_notice"]}}},
    }
    volumes = [{"name": "polyfleet", "emptyDir": {}}, *_shared_volumes(kubernetes)]
    account: Document = {"serviceAccountName": pool_settings.service_account} if pool_settings.service_account else {}
    return (
        _pod(container, volumes, kubernetes)
        | {"terminationGracePeriodSeconds": GRACE_S}
        | (account or {"automountServiceAccountToken": False})
        | _placement(_selector(shape, pool_settings), _taints(shape) + _tolerations(pool_settings.tolerations))
    )


def _variables(shape: Shape, fleet: FleetSpec, kubernetes: KubernetesFleet) -> dict[str, str]:
    folders = storages(fleet, STORAGE)
    neighbours = other_storages(folders, shape.pool) if kubernetes.storage_claim else None
    return {"POLYFLEET_NODE_DIR": f"{HOME}/node"} | shape.variables(folders[shape.pool], neighbours)


def _device_resource(shape: Shape, pool_settings: KubernetesPool) -> str:
    resource = pool_settings.resource or catalogue.vendor(shape.spec.backend).kubernetes_resource
    if not resource:
        raise SpecError(
            f"pools.{shape.pool}.kubernetes.resource",
            f"the catalogue does not name the resource of {shape.spec.backend}'s device plugin",
            "write the name of its resource, as `kubectl describe node` shows it"
        )  # fmt: skip
    return resource


def _selector(shape: Shape, pool_settings: KubernetesPool) -> dict[str, str]:
    """Return the user's node selector, else the catalogue's.

    GKE's two labels of a TPU slice are always included, because Ray reads them.
    """
    selector = _catalogue_selector(shape)
    if pool_settings.node_selector is not None:
        return (selector if shape.spec.topology else {}) | pool_settings.node_selector
    return selector | (_spot(shape.pool, selector) if shape.spec.spot else {})


def _spot(pool: str, selector: dict[str, str]) -> dict[str, str]:
    for prefix, labels in SPOT.items():
        if any(key.startswith(prefix) for key in selector):
            return labels
    raise missing_field(
        f"pools.{pool}.kubernetes.node_selector",
        "a pool of spot machines on an unknown cloud",
        'name the label that marks them, e.g. {cloud.google.com/gke-spot: "true"}',
    )


def _catalogue_selector(shape: Shape) -> dict[str, str]:
    key, _, common_value = catalogue.vendor(shape.spec.backend).kubernetes_selector.partition("=")
    label = catalogue.kubernetes_label(shape.kind, shape.devices)
    value = common_value or (label.label if label else "")
    return ({key: value} if key and value else {}) | (
        {TPU_TOPOLOGY: shape.spec.topology} if shape.spec.topology else {}
    )


def _taints(shape: Shape) -> list[Document]:
    taint = catalogue.vendor(shape.spec.backend).kubernetes_taint if shape.devices else ""
    return [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}] if taint else []


def _tolerations(tolerations: Tolerations) -> list[Document]:
    return [toleration.model_dump(exclude_defaults=True) for toleration in tolerations]


def _placement(selector: dict[str, str], tolerations: list[Document]) -> Document:
    fields = {"nodeSelector": selector, "tolerations": tolerations}
    return {key: value for key, value in fields.items() if value}


def _container(name: str, image: str, fleet: str, variables: dict[str, str]) -> Document:
    """Return a container. `$(` in values is escaped, because Kubernetes would expand $(NAME)."""
    return {
        "name": name,
        "image": image,
        "envFrom": [{"configMapRef": {"name": _config(fleet)}}],
        "env": [{"name": key, "value": value.replace("$(", "$$(")} for key, value in sorted(variables.items())],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _pod(container: Document, volumes: list[Document], kubernetes: KubernetesFleet) -> Document:
    secrets = [{"name": name} for name in kubernetes.image_pull_secrets]
    pull_secrets = {"imagePullSecrets": secrets} if secrets else {}
    group = {} if kubernetes.fs_group is None else {"securityContext": {"fsGroup": kubernetes.fs_group}}
    return {"containers": [container], "volumes": volumes} | pull_secrets | group


def _amounts(limits: dict[str, str]) -> Document:
    return {"limits": limits, "requests": dict(limits)}


def _mount(name: str, path: str) -> Document:
    return {"name": name, "mountPath": path}


def _shared_volumes(kubernetes: KubernetesFleet) -> list[Document]:
    volume_claim = kubernetes.storage_claim
    return [{"name": "storage", "persistentVolumeClaim": {"claimName": volume_claim}}] if volume_claim else []


def _shared_mounts(kubernetes: KubernetesFleet) -> list[Document]:
    return [_mount("storage", STORAGE)] if kubernetes.storage_claim else []


def _quantity(size: int) -> str:
    """Return the size in the largest unit that divides it."""
    units = [(1 << 40, "Ti"), (10**12, "T"), (1 << 30, "Gi"), (10**9, "G"), (1 << 20, "Mi"), (10**6, "M")]
    return next((f"{size // unit}{name}" for unit, name in units if size % unit == 0), str(size))


def _remarks(kubernetes: KubernetesFleet, pool_shapes: list[Shape]) -> list[str]:
    remarks = []
    if not kubernetes.storage_claim:
        remarks.append("without kubernetes.storage_claim, checkpoints are stored in pods and are lost with them")
    for shape in pool_shapes:
        pool_settings = shape.spec.kubernetes or KubernetesPool()
        if shape.devices and not _selector(shape, pool_settings):
            problem = f"no node label selects {shape.kind}, so pods may run on any node with such devices"
            remarks.append(f"pool {shape.pool}: {problem}; name a label in pools.{shape.pool}.kubernetes.node_selector")
    return remarks
