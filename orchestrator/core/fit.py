"""Which devices can serve a candidate. A rule returns "" when it agrees, else the sentence that `explain` prints."""

from collections.abc import Callable, Iterable

from cluster.catalogue import meets
from orchestrator.core.model import Candidate, Devices, Job

ANY = "any"
Rule = Callable[[Candidate, Devices], str]


def least(want: Candidate, have: Devices) -> int:
    """The fewest devices of this node with which the candidate runs."""
    return have.total if want.exclusive else want.min_count


def matches(pattern: str, have: Devices) -> bool:
    """Equal, in any case; the backend alone; `any`; or the model's family: `nvidia:H100` takes `nvidia:H100-80GB`."""
    return pattern.lower() == ANY or meets(pattern, have.kind)


def asked_by_name(want: Candidate, have: Devices) -> bool:
    """The full kind or the pool itself was written down, so nothing is chosen behind the user's back."""
    return want.pool == have.pool or any(pattern.lower() == have.kind.lower() for pattern in want.kinds)


def right_kind(want: Candidate, have: Devices) -> str:
    if any(matches(pattern, have) for pattern in want.kinds):
        return ""
    return f"is {have.kind}, job accepts {', '.join(want.kinds)}"


def not_emulated_unasked(want: Candidate, have: Devices) -> str:
    if not have.emulated or asked_by_name(want, have):
        return ""
    return f"is emulated on the CPU; ask for {have.kind} or pool {have.pool} to use it"


def right_pool(want: Candidate, have: Devices) -> str:
    if want.pool in ("", have.pool):
        return ""
    return f"is in pool {have.pool}, job asks for pool {want.pool}"


def right_node(want: Candidate, have: Devices) -> str:
    if want.node in ("", have.node):
        return ""
    return f"is node {have.node}, job asks for node {want.node}"


def enough_memory(want: Candidate, have: Devices) -> str:
    if have.memory_bytes >= want.memory_bytes:
        return ""
    if not have.memory_bytes:
        return f"memory per device is unknown, job needs {_gib(want.memory_bytes)} GiB"
    return f"{_gib(have.memory_bytes)} GiB per device, job needs {_gib(want.memory_bytes)}"


def enough_devices(want: Candidate, have: Devices) -> str:
    if have.total >= least(want, have):
        return ""
    return f"has {_devices(have.total)} in all, job needs {needed(want)}"


def node_takes_jobs(_want: Candidate, have: Devices) -> str:
    if have.schedulable:
        return ""
    return have.reason or f"node {have.node} takes no jobs now"


def enough_free(want: Candidate, have: Devices) -> str:
    if len(have.free) >= least(want, have):
        return ""
    are = "is" if have.total == 1 else "are"
    return f"{len(have.free)} of {_devices(have.total)} {are} free, job needs {needed(want)}"


def other_vendor(job: Job, have: Devices) -> str:
    """A job that may not cross vendors stays with the back end it last ran on."""
    if job.recovery.cross_vendor or job.backend in ("", have.backend):
        return ""
    return f"is {have.backend}; the job last ran on {job.backend}, and recovery.cross_vendor is false"


EVER: tuple[Rule, ...] = (right_kind, not_emulated_unasked, right_pool, right_node, enough_memory, enough_devices)
"""What no waiting will change on these devices."""

LASTING: tuple[Rule, ...] = (*EVER, node_takes_jobs)
"""What no decision of one plan will change."""

RULES: tuple[Rule, ...] = (*LASTING, enough_free)


def refusal(want: Candidate, have: Devices, rules: Iterable[Rule] = RULES) -> str:
    return next(filter(None, (rule(want, have) for rule in rules)), "")


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def needed(want: Candidate) -> str:
    """How many devices of a node, in words."""
    if want.exclusive:
        return "all of them (exclusive)"
    return f"{want.min_count}" if want.min_count == want.count else f"at least {want.min_count}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}".removesuffix(".0")
