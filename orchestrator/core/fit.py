"""Which devices can serve a candidate. A rule returns "" when it agrees, else the sentence that `explain` prints."""

from collections.abc import Callable, Iterable

from cluster.catalogue import architecture_of, features, has_native_dtype, matches_pattern, offers
from orchestrator.core.model import Candidate, Devices, Job

ANY = "any"
Rule = Callable[[Candidate, Devices], str]


def least(want: Candidate, have: Devices) -> int:
    """The fewest devices of this node with which the candidate runs."""
    return have.total if want.exclusive else want.min_count


def matches(pattern: str, have: Devices) -> bool:
    """Equal, in any case; the backend alone; `any`; or the model's family: `nvidia:H100` takes `nvidia:H100-80GB`."""
    return pattern.lower() == ANY or matches_pattern(pattern, have.kind)


def asked_by_name(want: Candidate, have: Devices) -> bool:
    """The full kind or the pool itself was written down, so nothing is chosen behind the user's back."""
    return have.pool in (want.pool, *want.pools) or any(pattern.lower() == have.kind.lower() for pattern in want.kinds)


def right_kind(want: Candidate, have: Devices) -> str:
    if any(matches(pattern, have) for pattern in want.kinds):
        return ""
    return f"is {have.kind}, job accepts {', '.join(want.kinds)}"


def not_emulated_unasked(want: Candidate, have: Devices) -> str:
    if not have.emulated or asked_by_name(want, have):
        return ""
    return f"is emulated on the CPU; ask for {have.kind} or pool {have.pool} to use it"


def right_pool(want: Candidate, have: Devices) -> str:
    if want.pool not in ("", have.pool):
        return f"is in pool {have.pool}, job asks for pool {want.pool}"
    if want.pools and have.pool not in want.pools:
        return f"is in pool {have.pool}, job asks for pools {', '.join(want.pools)}"
    return f"is in pool {have.pool}, which the job excludes" if have.pool in want.not_pools else ""


def computes_with(want: Candidate, have: Devices) -> str:
    """Natively, by what is written of its kind: what nobody wrote down is not promised."""
    known = {dtype: has_native_dtype(have.backend, architecture_of(have.kind), dtype) for dtype in want.dtypes}
    if wrong := next((dtype for dtype, told in known.items() if told is False), ""):
        return f"does not compute with {wrong} natively, which the job asks for"
    unknown = next((dtype for dtype, told in known.items() if told is None), "")
    return f"is not known to compute with {unknown} natively, which the job asks for" if unknown else ""


def offers_features(want: Candidate, have: Devices) -> str:
    """By what is written of its kind."""
    known = {asked: offers(have.kind, asked) for asked in want.features}
    if missing := next((asked for asked, told in known.items() if not told), ""):
        name, _, which = missing.partition("=")
        asks = "which the job asks for" if not which else f"job asks for {which}"
        if known[missing] is None:
            return f"is not known to offer {name}, {asks}"
        return f"offers {name} {features(have.kind)[name]}, {asks}" if which else f"does not offer {name}, {asks}"
    return ""


def right_node(want: Candidate, have: Devices) -> str:
    if want.node in ("", have.node):
        return ""
    return f"is node {have.node}, job asks for node {want.node}"


def enough_memory(want: Candidate, have: Devices) -> str:
    if have.memory_bytes >= want.memory_bytes:
        return _enough_together(want, have)
    if not have.memory_bytes:
        return f"memory per device is unknown, job needs {gib(want.memory_bytes)} GiB{_estimated(want)}"
    return f"{gib(have.memory_bytes)} GiB per device, job needs {gib(want.memory_bytes)}{_estimated(want)}"


def _enough_together(want: Candidate, have: Devices) -> str:
    """For devices that share the memory of their machine."""
    needed_bytes = want.memory_bytes * min(least(want, have), have.total)
    if not have.host or needed_bytes <= have.host_memory_bytes:
        return ""
    return f"its devices share {gib(have.host_memory_bytes)} GiB, job needs {gib(needed_bytes)}{_estimated(want)}"


def _estimated(want: Candidate) -> str:
    return " (estimated from its model)" if want.memory_estimated else ""


def enough_devices(want: Candidate, have: Devices) -> str:
    if have.total >= least(want, have):
        return ""
    return f"has {_devices(have.total)} in all, job needs {needed(want)}"


def not_too_dear(want: Candidate, have: Devices) -> str:
    if not want.max_price or have.price_per_hour <= want.max_price:
        return ""
    return f"costs {have.price_per_hour:g} per device and hour, job pays at most {want.max_price:g}"


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


REQUESTED: tuple[Rule, ...] = (right_kind, not_emulated_unasked, right_pool, right_node)
"""What makes devices those that the job asks for."""

EVER: tuple[Rule, ...] = (
    *REQUESTED,
    *(enough_memory, enough_devices, not_too_dear, computes_with, offers_features),
)
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


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}".removesuffix(".0")
