"""Rules for the devices that a candidate may use. Each returns "" to accept, else a reason for `explain`."""

from collections.abc import Callable, Iterable

from cluster.catalogue import architecture_of, features, has_native_dtype, matches_pattern, offers
from orchestrator.core.model import Candidate, Devices, Job

ANY = "any"
Rule = Callable[[Candidate, Devices], str]


def minimum_count(want: Candidate, have: Devices) -> int:
    """Return the smallest number of devices of this node with which the candidate can run."""
    takes_all = want.exclusive or (want.nodes > 1 and have.tpu_slice)  # written out, because it is called very often
    return have.total if takes_all else want.min_count


def takes_all_devices(want: Candidate, have: Devices) -> bool:
    """Return True if the candidate uses all devices of each of its nodes."""
    return want.exclusive or spans_slice(want, have)


def spans_slice(want: Candidate, have: Devices) -> bool:
    """Return True if the candidate needs several hosts, and this node is one of a TPU slice."""
    return want.nodes > 1 and have.tpu_slice is not None


def matches(pattern: str, have: Devices) -> bool:
    """Return True if `pattern` is `any`, the backend, the kind or its model family, ignoring case.

    Example of a family: `nvidia:H100` matches `nvidia:H100-80GB`.
    """
    return pattern.lower() == ANY or matches_pattern(pattern, have.kind)


def is_named(want: Candidate, have: Devices) -> bool:
    """Return True if the user named the pool or the full kind, and so chose these devices explicitly."""
    return have.pool in (want.pool, *want.pools) or any(pattern.lower() == have.kind.lower() for pattern in want.kinds)


def right_kind(want: Candidate, have: Devices) -> str:
    if any(matches(pattern, have) for pattern in want.kinds):
        return ""
    return f"is of kind {have.kind}, but the job accepts {', '.join(want.kinds)}"


def emulated_only_if_named(want: Candidate, have: Devices) -> str:
    if not have.emulated or is_named(want, have):
        return ""
    return f"is emulated on the CPU; request {have.kind} or pool {have.pool} to use it"


def right_pool(want: Candidate, have: Devices) -> str:
    if want.pool not in ("", have.pool):
        return f"is in pool {have.pool}, but the job requires pool {want.pool}"
    if want.pools and have.pool not in want.pools:
        return f"is in pool {have.pool}, but the job requires pools {', '.join(want.pools)}"
    return f"is in pool {have.pool}, which the job excludes" if have.pool in want.not_pools else ""


def supports_dtypes(want: Candidate, have: Devices) -> str:
    """Check native support of the requested dtypes in the catalogue; a dtype without an entry is refused."""
    supported = {dtype: has_native_dtype(have.backend, architecture_of(have.kind), dtype) for dtype in want.dtypes}
    if wrong := next((dtype for dtype, native in supported.items() if native is False), ""):
        return f"does not compute with {wrong} natively, which the job requires"
    unknown = next((dtype for dtype, native in supported.items() if native is None), "")
    return f"has no documented native support for {unknown}, which the job requires" if unknown else ""


def offers_features(want: Candidate, have: Devices) -> str:
    """Check the requested features in the catalogue's entry of the kind."""
    offered = {feature: offers(have.kind, feature) for feature in want.features}
    if missing := next((feature for feature, has_it in offered.items() if not has_it), ""):
        name, _, which = missing.partition("=")
        request_text = "which the job requires" if not which else f"but the job requires {which}"
        if offered[missing] is None:
            return f"has no documented support for {name}, {request_text}"
        return (
            f"offers {name} {features(have.kind)[name]}, {request_text}"
            if which
            else f"does not offer {name}, {request_text}"
        )
    return ""


def right_node(want: Candidate, have: Devices) -> str:
    if want.node in ("", have.node):
        return ""
    return f"is node {have.node}, but the job requires node {want.node}"


def enough_memory(want: Candidate, have: Devices) -> str:
    if have.memory_bytes >= want.memory_bytes:
        return _enough_together(want, have)
    if not have.memory_bytes:
        return f"has unknown memory per device, but the job needs {gib(want.memory_bytes)} GiB{_estimated(want)}"
    return (
        f"has {gib(have.memory_bytes)} GiB per device, but the job needs {gib(want.memory_bytes)} GiB{_estimated(want)}"
    )


def _enough_together(want: Candidate, have: Devices) -> str:
    """Check the total of a candidate on devices that share the memory of their machine."""
    needed_bytes = want.memory_bytes * min(minimum_count(want, have), have.total)
    if not have.host or needed_bytes <= have.host_memory_bytes:
        return ""
    return (
        f"has {gib(have.host_memory_bytes)} GiB that its devices share, "
        f"but the job needs {gib(needed_bytes)} GiB{_estimated(want)}"
    )


def _estimated(want: Candidate) -> str:
    return " (estimated from its model)" if want.memory_estimated else ""


def enough_devices(want: Candidate, have: Devices) -> str:
    if have.total >= minimum_count(want, have):
        return ""
    return f"has {_devices(have.total)} in all, but the job needs {needed_text(want)}"


def complete_slice(want: Candidate, have: Devices) -> str:
    """Check that a candidate on several hosts of a TPU slice uses all of them, and all their chips."""
    if have.tpu_slice is None or not spans_slice(want, have):
        return ""
    hosts, name = have.tpu_slice.hosts, have.tpu_slice.name
    if not name:
        return f"is one of {hosts} hosts of a TPU slice without a name; set TPU_NAME on each host of the slice"
    if want.nodes != hosts:
        return f"is one of {hosts} hosts of TPU slice {name}, which are used together, but the job needs {want.nodes}"
    if want.exclusive or (want.min_count <= have.total <= want.count and want.divides(have.total)):
        return ""
    devices = f"all {have.total} chips of each host of TPU slice {name} are used together"
    if have.total > want.count:
        return f"has too many devices: {devices}, but the job needs {needed_text(want)}"
    return f"cannot divide the job's batch of {want.batch_size} equally: {devices}"


def within_price_limit(want: Candidate, have: Devices) -> str:
    if not want.max_price or have.price_per_hour <= want.max_price:
        return ""
    return f"costs {have.price_per_hour:g} per device and hour, but the job pays at most {want.max_price:g}"


def node_takes_jobs(_want: Candidate, have: Devices) -> str:
    if have.schedulable:
        return ""
    return have.reason or f"node {have.node} takes no jobs now"


def enough_free(want: Candidate, have: Devices) -> str:
    if len(have.free) >= minimum_count(want, have):
        return ""
    needed = needed_text(want)
    if have.tpu_slice and spans_slice(want, have):
        needed = f"all of them (TPU slice {have.tpu_slice.name})"
    return f"has {len(have.free)} of {_devices(have.total)} free, but the job needs {needed}"


def vendor_change_reason(job: Job, have: Devices) -> str:
    """Return the reason why a job that may not change vendors cannot move to this back end, or ""."""
    if job.recovery.cross_vendor or job.backend in ("", have.backend):
        return ""
    return f"is {have.backend}; the job last ran on {job.backend}, and recovery.cross_vendor is false"


REQUEST_RULES: tuple[Rule, ...] = (right_kind, emulated_only_if_named, right_pool, right_node)
"""Rules that compare devices with what the job requires."""

PERMANENT_RULES: tuple[Rule, ...] = (
    *REQUEST_RULES,
    *(enough_memory, enough_devices, complete_slice, within_price_limit, supports_dtypes, offers_features),
)
"""Rules whose result does not change however long the job waits."""

STATIC_RULES: tuple[Rule, ...] = (*PERMANENT_RULES, node_takes_jobs)
"""Rules whose result does not change while one plan is made."""

RULES: tuple[Rule, ...] = (*STATIC_RULES, enough_free)


def refusal_reason(want: Candidate, have: Devices, rules: Iterable[Rule] = RULES) -> str:
    return next(filter(None, (rule(want, have) for rule in rules)), "")


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def needed_text(want: Candidate) -> str:
    """Say how many devices of one node the candidate needs."""
    if want.exclusive:
        return "all of them (exclusive)"
    return f"{want.min_count}" if want.min_count == want.count else f"at least {want.min_count}"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}".removesuffix(".0")
