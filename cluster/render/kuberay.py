"""A RayCluster for KubeRay 1.7, one worker group per pool, and a ConfigMap of what all its pods are told.

KubeRay's operator and Ray's autoscaler both derive a group's resources, and neither knows every vendor's: they are said
outright, as the group's `resources`, which must not stand in rayStartParams too. Labels belong to the group as well.
"""

from cluster import catalogue
from cluster.errors import SpecError
from cluster.fleet_spec import FleetSpec
from cluster.render.document import Document, Note, text
from cluster.render.shapes import Shape, lacking, others, ray_version, settings, shapes, storages
from cluster.render.spec import KubernetesFleet, KubernetesHead, KubernetesPool, Tolerations, size_bytes
from cluster.version import VERSION

NEEDED = ("cpus", "memory", "image")
HOME, STORAGE, TOKEN = "/polyfleet", "/polyfleet-storage", "/polyfleet-token"
TPU_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
SPOT = {
    "cloud.google.com/": {"cloud.google.com/gke-spot": "true"},
    "node.kubernetes.io/instance-type": {"eks.amazonaws.com/capacityType": "SPOT"},
}
"""By the beginning of a selector that the catalogue knows: what marks spot machines on that cloud."""
GRACE_S = 60
"""Of which attempts have 30 s to save (cluster/termination_notice.py)."""


def render(fleet: FleetSpec) -> tuple[str, list[str]]:
    """The file, and what whoever applies it should know. Raises SpecError."""
    kubernetes = fleet.kubernetes or KubernetesFleet()
    if kubernetes.head is None:
        raise lacking("kubernetes.head", "a RayCluster", "write e.g. {image: registry/polyfleet:tag}")
    if not fleet.name[0].isalpha() or fleet.name.endswith("-"):
        raise SpecError("name", f"{fleet.name!r} cannot be a RayCluster's name", "begin with a letter, end without `-`")
    found = shapes(fleet, NEEDED)
    groups = [_group(shape, fleet, kubernetes) for shape in found]
    grows = any(shape.grows for shape in found)
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
    return text(preface | config | data, cluster), _remarks(kubernetes, found)


def _config(fleet: str) -> str:
    return f"{fleet}-settings"


def _preface(name: str, kubernetes: KubernetesFleet) -> str:
    namespace = kubernetes.namespace
    return f"""Fleet {name}, rendered by Polyfleet {VERSION} for KubeRay 1.7 or newer.

Every image must hold the same Python, to the patch version, and the packages polyfleet=={VERSION} and
ray[default]=={ray_version()}: without `default`, KubeRay's probes get no answer and end the pods.
An image of a pool also holds its vendor's torch. Nothing secret stands in this file.

  kubectl apply -f THIS_FILE
  kubectl -n {namespace} exec -it $(kubectl -n {namespace} get pod -o name \\
    -l ray.io/cluster={name},ray.io/node-type=head) -c ray-head -- bash
  polyfleet up --address "$(hostname -i):6379"      # in that pod; `-f FLEET_FILE` as well where pools grow"""


def _authentication(kubernetes: KubernetesFleet) -> Document:
    secret = kubernetes.token_secret
    note = f"the token is in Secret {secret}, key auth_token" if secret else "KubeRay makes the token's Secret"
    return {Note(note): None, "mode": "token"} | ({"secretName": secret} if secret else {})


def _autoscaler(kubernetes: KubernetesFleet) -> Document:
    options = {"version": "v2", "idleTimeoutSeconds": kubernetes.idle_timeout_s}
    return {"enableInTreeAutoscaling": True, "autoscalerOptions": options}


def _head(name: str, kubernetes: KubernetesFleet, head: KubernetesHead) -> Document:
    """Its dashboard stays on the pod's own loopback; nothing but Ray's port is told to the Service."""
    secret = kubernetes.token_secret or name
    variables = {"RAY_AUTH_TOKEN_PATH": f"{TOKEN}/auth_token"}
    claim = head.home_claim
    home = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    without = {} if claim else {Note("jobs end with this pod: kubernetes.head.home_claim keeps them"): None}
    volumes: list[Document] = [
        {"name": "polyfleet"} | without | home,
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
        Note(f"\npool {shape.pool}: {_told(shape)}"): None,
        "groupName": shape.pool,
        **scale,
        "replicas": shape.least // shape.hosts,
        "minReplicas": shape.least // shape.hosts,
        "maxReplicas": shape.most // shape.hosts,
        **slices,
        "rayStartParams": {},
        "labels": shape.labels(),
        "resources": {name: str(count) for name, count in shape.resources().items()},
        "template": {"spec": _worker(shape, fleet, kubernetes)},
    }


def _told(shape: Shape) -> str:
    return f"{shape.devices} x {shape.kind} per node" if shape.devices else "CPUs"


def _worker(shape: Shape, fleet: FleetSpec, kubernetes: KubernetesFleet) -> Document:
    own, pool = shape.spec.kubernetes or KubernetesPool(), shape.spec
    limits = {"cpu": str(pool.cpus), "memory": _quantity(shape.memory_bytes)}
    if shape.devices:
        limits[_device_resource(shape, own)] = str(shape.devices)
    container = _container("ray-worker", pool.image, fleet.name, _variables(shape, fleet, kubernetes)) | {
        "resources": _amounts(limits),
        "volumeMounts": [_mount("polyfleet", HOME), *_shared_mounts(kubernetes)],
        Note("jobs save before the pod ends"): None,
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-m", "cluster.termination_notice"]}}},
    }
    volumes = [{"name": "polyfleet", "emptyDir": {}}, *_shared_volumes(kubernetes)]
    account: Document = {"serviceAccountName": own.service_account} if own.service_account else {}
    return (
        _pod(container, volumes, kubernetes)
        | {"terminationGracePeriodSeconds": GRACE_S}
        | (account or {"automountServiceAccountToken": False})
        | _placement(_selector(shape, own), _taints(shape) + _tolerations(own.tolerations))
    )


def _variables(shape: Shape, fleet: FleetSpec, kubernetes: KubernetesFleet) -> dict[str, str]:
    folders = storages(fleet, STORAGE)
    neighbours = others(folders, shape.pool) if kubernetes.storage_claim else None
    return {"POLYFLEET_NODE_DIR": f"{HOME}/node"} | shape.variables(folders[shape.pool], neighbours)


def _device_resource(shape: Shape, own: KubernetesPool) -> str:
    known = own.resource or catalogue.vendor(shape.spec.backend).kubernetes_resource
    if not known:
        raise SpecError(
            f"pools.{shape.pool}.kubernetes.resource", f"no device plugin of {shape.spec.backend} is known",
            "name what it counts, as `kubectl describe node` shows it"
        )  # fmt: skip
    return known


def _selector(shape: Shape, own: KubernetesPool) -> dict[str, str]:
    """The user's, else those that the catalogue knows; GKE's two of a TPU slice always: Ray reads them."""
    known = _known_selector(shape)
    if own.node_selector is not None:
        return (known if shape.spec.topology else {}) | own.node_selector
    return known | (_spot(shape.pool, known) if shape.spec.spot else {})


def _spot(pool: str, known: dict[str, str]) -> dict[str, str]:
    for start, mark in SPOT.items():
        if any(key.startswith(start) for key in known):
            return mark
    raise lacking(
        f"pools.{pool}.kubernetes.node_selector",
        "a pool of spot machines on an unknown cloud",
        'name the label that marks them, e.g. {cloud.google.com/gke-spot: "true"}',
    )


def _known_selector(shape: Shape) -> dict[str, str]:
    key, _, same = catalogue.vendor(shape.spec.backend).kubernetes_selector.partition("=")
    known = catalogue.kubernetes_label(shape.kind, shape.devices)
    value = same or (known.label if known else "")
    return ({key: value} if key and value else {}) | (
        {TPU_TOPOLOGY: shape.spec.topology} if shape.spec.topology else {}
    )


def _taints(shape: Shape) -> list[Document]:
    taint = catalogue.vendor(shape.spec.backend).kubernetes_taint if shape.devices else ""
    return [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}] if taint else []


def _tolerations(given: Tolerations) -> list[Document]:
    return [toleration.model_dump(exclude_defaults=True) for toleration in given]


def _placement(selector: dict[str, str], tolerations: list[Document]) -> Document:
    found = {"nodeSelector": selector, "tolerations": tolerations}
    return {key: value for key, value in found.items() if value}


def _container(name: str, image: str, fleet: str, variables: dict[str, str]) -> Document:
    """Kubernetes expands $(NAME) in values; what users wrote stays as it is."""
    return {
        "name": name,
        "image": image,
        "envFrom": [{"configMapRef": {"name": _config(fleet)}}],
        "env": [{"name": key, "value": value.replace("$(", "$$(")} for key, value in sorted(variables.items())],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _pod(container: Document, volumes: list[Document], kubernetes: KubernetesFleet) -> Document:
    secrets = [{"name": name} for name in kubernetes.image_pull_secrets]
    pulled = {"imagePullSecrets": secrets} if secrets else {}
    group = {} if kubernetes.fs_group is None else {"securityContext": {"fsGroup": kubernetes.fs_group}}
    return {"containers": [container], "volumes": volumes} | pulled | group


def _amounts(limits: dict[str, str]) -> Document:
    return {"limits": limits, "requests": dict(limits)}


def _mount(name: str, path: str) -> Document:
    return {"name": name, "mountPath": path}


def _shared_volumes(kubernetes: KubernetesFleet) -> list[Document]:
    claim = kubernetes.storage_claim
    return [{"name": "storage", "persistentVolumeClaim": {"claimName": claim}}] if claim else []


def _shared_mounts(kubernetes: KubernetesFleet) -> list[Document]:
    return [_mount("storage", STORAGE)] if kubernetes.storage_claim else []


def _quantity(size: int) -> str:
    """In the largest unit that divides it."""
    units = [(1 << 40, "Ti"), (10**12, "T"), (1 << 30, "Gi"), (10**9, "G"), (1 << 20, "Mi"), (10**6, "M")]
    return next((f"{size // unit}{name}" for unit, name in units if size % unit == 0), str(size))


def _remarks(kubernetes: KubernetesFleet, found: list[Shape]) -> list[str]:
    said = []
    if not kubernetes.storage_claim:
        said.append("without kubernetes.storage_claim checkpoints lie in pods and are lost with them")
    for shape in found:
        own = shape.spec.kubernetes or KubernetesPool()
        if shape.devices and not _selector(shape, own):
            told = f"no label of nodes with {shape.kind} is known: any node with such devices may be taken"
            said.append(f"pool {shape.pool}: {told}; pools.{shape.pool}.kubernetes.node_selector names one")
    return said
