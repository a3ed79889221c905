"""What runs on every node: finds its devices, runs its attempts, serves its checkpoints. One Ray actor per node.

It remembers nothing: after kill -9 the new agent reads everything back from the node's folder and goes on with attempts
that never stopped. Arguments and results are plain data. Without Ray it is an ordinary object.
"""

import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.catalogue import vendor
from cluster.errors import UserError
from cluster.paths import private_dir
from cluster.serialization import to_plain
from workers import termination_notice
from workers.attempt import fence, lease, network_interfaces, process_tree
from workers.attempt.attempts import AttemptManager
from workers.attempt.fence import FenceReader
from workers.attempt.rank_environment import threads_per_rank
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.benchmark.session_server import request
from workers.controller_generation import ControllerGeneration
from workers.discovery import discover
from workers.discovery.device_use import LiveUse
from workers.discovery.machine import Machine
from workers.discovery.node_facts import node_facts, node_identity
from workers.discovery.resource_limits import cores
from workers.errors import ControllerSuperseded
from workers.execs import NodeExecs
from workers.messages import InvalidMessage, Order, ScriptCheckpoint
from workers.node_files import NodeFiles
from workers.script_checkpoints import ScriptCheckpoints
from workers.termination_notice import NoticeWatcher

FACTS_EVERY_S = 10.0
DISCOVER_EVERY_S = 60.0
FENCE_EVERY_S = 1.0
SILENT_SHARE_OF_LEASE = 1 / 3
"""The agent answers a watch within this share, and reads the fence after so long without a call of the server."""
LOG = logging.getLogger(__name__)


class Agent(NodeFiles, NodeExecs):
    """Defaults come from the POLYFLEET_… variables of an embedded node, else from what is found on this machine.

    `starter` is one that was begun already; else the agent begins its own. `cpus`: how many of this machine's Ray gives
    out, 0 for all.
    """

    def __init__(
        self,
        node_dir: Path | None = None,
        storage: Path | None = None,
        node: str | None = None,
        pool: str | None = None,
        backend: str | None = None,
        fleet: str | None = None,
        fences: Path | None = None,
        starter: SupervisorLauncher | None = None,
        cpus: float = 0.0,
    ):
        NodeFiles.__init__(self, node_identity(node, pool, backend, node_dir, storage, fleet))
        NodeExecs.__init__(self)
        if mask := os.environ.get("POLYFLEET_UMASK"):  # Ray's own files are made under a stricter one
            os.umask(int(mask, 8))
        if _ray() is not None:
            process_tree.killed_for_memory(first=False)
        private_dir(self._place.node_dir)
        self._cpus = cpus
        self._use = LiveUse()
        self._discover()
        self._generation = ControllerGeneration(self._place.node_dir / "generation")
        own = self._place.fleet == os.environ.get("POLYFLEET_FLEET", "")
        given = os.environ.get("POLYFLEET_FENCES") if own else None  # fences of the node's own fleet
        shared = fences or (Path(given) if given else None)
        self._fences = FenceReader(self._place.fleet, shared, _stored if _ray() is not None else None)
        folder, ours, starter = self._place.node_dir / "attempts", self._place, starter or SupervisorLauncher.begun()
        self._attempts = AttemptManager(
            folder, ours.storage, ours.node, self._packages, self._threads, self._fences, starter
        )
        self._script_checkpoints = ScriptCheckpoints(self._attempts, self._storage)
        self._told_s = float("-inf")
        self._heard_s = time.monotonic()
        self._notices = NoticeWatcher(termination_notice.files(ours.node_dir), self._attempts, self._tell_facts)
        self._notices.follow()
        if shared is not None or _ray() is not None:
            threading.Thread(target=self._watch_fences, name="fences", daemon=True).start()

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        self._devices, self._findings = discover(self._place.backend)

    def _threads(self, order: Order) -> int:
        return threads_per_rank(self._cores(), len(self._devices), order)

    def _cores(self) -> int:
        """That the attempts here may use: a node of Ray may have been told fewer than the machine has."""
        there = cores(Machine())
        return max(1, min(there, int(self._cpus))) if self._cpus else there

    def hello(self, generation: int) -> dict[str, Any]:
        """{"facts", devices looked for anew; "generation", the newest seen; "epochs": {job: highest seen}; "clock_s"}.

        An older controller is answered too: it learns how high it has to count before it may act.
        """
        with suppress(ControllerSuperseded):
            self._generation.admit(generation)
        self._discover()
        seen = {"generation": self._generation.seen, "epochs": self._attempts.epochs()}
        return {"facts": self._facts(), **seen, "clock_s": lease.now_s()}

    def _facts(self) -> dict[str, Any]:
        self._told_s = time.monotonic()
        ray = _ray()
        node_id = ray.get_runtime_context().get_node_id() if ray else ""
        facts = node_facts(self._place, self._devices, self._findings, node_id, self.address())
        now = replace(facts, cpu_count=self._cores(), notice=self._notices.current, use=self._use.look(self._devices))
        now = replace(now, data=self._data.keys())
        plain: dict[str, Any] = to_plain(now)
        return plain

    def _tell_facts(self) -> None:
        """With the next answer, which is due now."""
        self._told_s = float("-inf")
        self._attempts.wake()

    def start(self, generation: int, order: dict[str, Any], secrets: dict[str, str]) -> None:
        """Start the ranks of an Order here; where it names no meeting point, we do. Idempotent. Raises EpochPast for
        one that is past or was stopped, and ControllerSuperseded for an older controller, as all calls that act;
        FleetError where its fence cannot be read.
        """
        self._generation.admit(generation)
        try:
            asked = Order.parse(order)
        except InvalidMessage as e:
            raise UserError(f"the order {e}", "install the same Polyfleet version on server and node") from None
        if not asked.master_address:
            address, port = self.meeting_place()
            asked = replace(asked, master_address=address, master_port=port)
        named = {str(d.index): str(d.properties["visible_as"]) for d in self._devices if "visible_as" in d.properties}
        interface = network_interfaces.of_this_machine(self.address())
        self._attempts.start(replace(asked, visible_as=named), secrets, interface)
        if ScriptCheckpoint.of(asked.task, asked.arguments):
            self._script_checkpoints.follow()

    def stop(self, generation: int, job: str, epoch: int, how: str) -> None:
        """`how` is one of workers.messages.STOPS. An attempt that is not known here never starts."""
        self._generation.admit(generation)
        self._attempts.stop(job, epoch, how)

    def watch(
        self,
        generation: int,
        cursors: dict[str, int],
        known: dict[str, str],
        timeout_s: float,
        clock_s: float | None = None,
        gather_s: float = 0.0,
    ) -> dict[str, Any]:
        """{"facts": NodeFacts or None, "reports": [AttemptStatus], "attempts": [key], "poison": {key: {"count",
        "reason"}}, "clock_s"} at news, else after `timeout_s`. What ranks tell waits for `gather_s`; a phase does not.

        `cursors` and `known` (phase) are by key, `job.epoch.node_rank`; "attempts" has every one this node knows,
        "poison" those whose ranks wrote what cannot be used. Each call renews all leases; so that they hold until the
        next call, one lasts no longer than a third of the shortest lease. `clock_s` is that of this node's last answer:
        leases are given from then on, so that a call that was late, or lay in a frozen process, stretches none.
        """
        self._generation.admit(generation)
        self._heard_s = time.monotonic()
        self._attempts.renew(clock_s)
        leases = [a.lease_s * SILENT_SHARE_OF_LEASE for a in self._attempts.live()]
        due_s = 0.0 if self._told_s == float("-inf") else timeout_s
        reports = self._attempts.news(cursors, known, min([due_s, *leases]), gather_s)
        told = {
            "reports": [r.to_plain() for r in reports],
            "attempts": self._attempts.known(),
            "poison": self._attempts.poison(),
        }
        return {"facts": self._facts_if_due(), **told, "clock_s": lease.now_s()}

    def _facts_if_due(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._discovered_s >= DISCOVER_EVERY_S:
            threading.Thread(target=self._discover, name="discovery", daemon=True).start()
        return self._facts() if now - self._told_s >= FACTS_EVERY_S else None

    def forget(self, generation: int, job: str, epoch: int) -> None:
        """The controller has the outcome durably: remove the ranks' folders, keep logs and records."""
        self._generation.admit(generation)
        self._attempts.forget(job, epoch)
        self._job_files.remove_empty(job, epoch)

    def remove(self, generation: int, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """The job was removed: so are records, logs and files of these attempts, job and epoch. Returns those gone."""
        self._generation.admit(generation)
        gone = self._attempts.remove([(str(job), int(epoch)) for job, epoch in attempts])
        for job, epoch in gone:
            self._job_files.remove(job, epoch)
        return gone

    def hand_on_checkpoint(self, job: str, epoch: int, *asked: Any) -> dict[str, Any]:
        """Before an attempt starts here: {"found", "text"}. `asked`: path and format of its script's checkpoint, then
        the back end and the number of its devices, with which the checkpoint is to be loaded.
        """
        path, format, backend, count = asked  # noqa: A001
        device = vendor(backend).torch_device
        return self._script_checkpoints.hand_on(job, int(epoch), path, format, device, int(count))

    def logs(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """{"data", "next", "more", "ended"}: whole lines of a rank's log from byte `offset`."""
        return self._attempts.log(job, epoch, rank, offset, limit_bytes)

    def log_tail(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int]:
        """{"start", "end"}: the bytes between which the last `count` lines of a rank's log lie."""
        return self._attempts.log_tail(job, epoch, rank, count)

    def measure(self, job: str, epoch: int, message: dict[str, Any], timeout_s: float) -> Any:
        """Ask the benchmark session of an attempt here. Raises NotFound, FleetError when it does not answer."""
        return request(self._attempts.folder(job, epoch), message, timeout_s)

    def meeting_place(self) -> tuple[str, int]:
        """Where the ranks of an attempt may meet: this node's address and a port of it."""
        return self.address(), self.free_port()

    def free_port(self) -> int:
        """A TCP port nobody listens on now."""
        with socket.socket() as s:
            s.bind((self.address(), 0))
            return int(s.getsockname()[1])

    def address(self) -> str:
        """Where other nodes reach this one."""
        ray = _ray()
        return str(ray.util.get_node_ip_address()) if ray else "127.0.0.1"

    def _watch_fences(self) -> None:
        """While the controller is silent for a third of a lease, read the fences that it writes.

        Never ends: every lease of this node would lapse the next time the controller is silent.
        """
        while True:
            time.sleep(FENCE_EVERY_S)
            silent_s = time.monotonic() - self._heard_s
            try:
                due = [a for a in self._attempts.live() if silent_s > a.lease_s * SILENT_SHARE_OF_LEASE]
                fence.renew_or_stop(due, self._fences)
            except Exception:
                LOG.exception("fences were not looked at")


def _ray() -> Any:
    """Ray, in a process that is part of a Ray cluster; else None. It is never imported for the asking."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _stored(key: str, limit_s: float) -> bytes | None:
    """What Ray's key-value store holds. Raises FenceUnreadable when it does not answer in time."""
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    store: Any = internal_kv
    try:
        client = store.internal_kv_get_gcs_client()
        value: bytes | None = client.internal_kv_get(key.encode(), None, timeout=limit_s)
        return value
    except (RayError, RuntimeError, OSError, ValueError) as e:
        raise fence.FenceUnreadable(str(e)) from e
