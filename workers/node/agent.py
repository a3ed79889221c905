"""The agent of a node: discovers its devices, runs its attempts, serves its checkpoints.

There is one per node, a Ray actor. It keeps no state that a restart would lose: after kill -9 the new agent reads
everything from the node's folder and takes over attempts that are still running. Arguments and results are plain data.
Without Ray it is an ordinary object.
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
from workers.attempt import network_interfaces
from workers.attempt.attempts import AttemptManager
from workers.attempt.rank_environment import threads_per_rank
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.benchmark.session_server import request
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.resource_limits import cores
from workers.errors import ControllerSuperseded
from workers.node import termination_notice
from workers.node.controller_generation import ControllerGeneration
from workers.node.device_use import LiveUse
from workers.node.execs import NodeExecs
from workers.node.node_facts import node_facts, node_identity
from workers.node.node_files import NodeFiles
from workers.node.script_checkpoints import ScriptCheckpoints
from workers.node.termination_notice import NoticeWatcher
from workers.processes import process_tree
from workers.protocol import fence, lease
from workers.protocol.fence import FenceReader
from workers.protocol.messages import InvalidMessage, Order, ScriptCheckpoint

SEND_FACTS_EVERY_S = 10.0
DISCOVER_EVERY_S = 60.0
FENCE_EVERY_S = 1.0
SILENT_SHARE_OF_LEASE = 1 / 3
"""Share of a lease within which `poll` returns, and after which, without a call from the server, the agent reads the
fences itself."""
LOG = logging.getLogger(__name__)


class Agent(NodeFiles, NodeExecs):
    """The agent's RPC methods.

    Defaults come from POLYFLEET_… variables (embedded nodes), else from this machine. `launcher` is one that has been
    started already; without one the agent starts its own. `cpus` is the number of this machine's CPUs that Ray hands
    out (0: all).
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
        launcher: SupervisorLauncher | None = None,
        cpus: float = 0.0,
    ):
        NodeFiles.__init__(self, node_identity(node, pool, backend, node_dir, storage, fleet))
        NodeExecs.__init__(self)
        if mask := os.environ.get("POLYFLEET_UMASK"):  # a stricter one was set for the files that Ray itself creates
            os.umask(int(mask, 8))
        if _ray() is not None:
            process_tree.set_oom_score(first=False)
            process_tree.reset_priority()
        private_dir(self._identity.node_dir)
        self._cpus = cpus
        self._use = LiveUse()
        self._discover()
        self._generation = ControllerGeneration(self._identity.node_dir / "generation")
        is_own_fleet = self._identity.fleet == os.environ.get("POLYFLEET_FLEET", "")
        fences_variable = (
            os.environ.get("POLYFLEET_FENCE_DIR") if is_own_fleet else None
        )  # the variable is about the node's own fleet
        shared = fences or (Path(fences_variable) if fences_variable else None)
        self._fences = FenceReader(self._identity.fleet, shared, _read_store if _ray() is not None else None)
        folder, identity, launcher = (
            self._identity.node_dir / "attempts",
            self._identity,
            launcher or SupervisorLauncher.start_new(),
        )
        self._attempts = AttemptManager(
            folder, identity.storage, identity.node, self._code_archives, self._threads, self._fences, launcher
        )
        for mirror in self._mirrors:
            mirror.start()
        self._script_checkpoints = ScriptCheckpoints(self._attempts, self._storage)
        self._facts_sent_s = float("-inf")
        self._last_contact_s = time.monotonic()
        self._notices = NoticeWatcher(
            termination_notice.notice_paths(identity.node_dir), self._attempts, self._send_facts_now
        )
        self._notices.start()
        if shared is not None or _ray() is not None:
            threading.Thread(target=self._watch_fences, name="fences", daemon=True).start()

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        self._devices, self._findings = discover(self._identity.backend)

    def _checkpoints_to_keep(self, job: str) -> int | None:
        return self._attempts.checkpoints_to_keep(job)

    def _ended_attempts(self) -> list[tuple[str, int]]:
        return self._attempts.ended_attempts()

    def _threads(self, order: Order) -> int:
        return threads_per_rank(self._cores(), len(self._devices), order)

    def _cores(self) -> int:
        """Number of cores that attempts here may use. Ray may hand out fewer than the machine has."""
        machine_cores = cores(Machine())
        return max(1, min(machine_cores, int(self._cpus))) if self._cpus else machine_cores

    def register(self, generation: int) -> dict[str, Any]:
        """Discover devices again and return the state of the node.

        Returns {"facts", "generation": newest received, "epochs": {job: highest received}, "clock_s"}. An older
        controller gets the same reply, which shows the generation that it must exceed for its calls to be accepted.
        """
        with suppress(ControllerSuperseded):
            self._generation.check_and_record(generation)
        self._discover()
        state = {"generation": self._generation.newest, "epochs": self._attempts.epochs()}
        return {"facts": self._facts(), **state, "clock_s": lease.now_s()}

    def _facts(self) -> dict[str, Any]:
        self._facts_sent_s = time.monotonic()
        ray = _ray()
        node_id = ray.get_runtime_context().get_node_id() if ray else ""
        findings = self._findings + tuple(finding for mirror in self._mirrors for finding in mirror.findings())
        facts = node_facts(self._identity, self._devices, findings, node_id, self.address())
        current = replace(
            facts, cpu_count=self._cores(), notice=self._notices.active_notice, use=self._use.current(self._devices)
        )
        pending = sum(mirror.pending_uploads for mirror in self._mirrors)
        current = replace(current, data=self._data.keys(), pending_uploads=pending)
        plain: dict[str, Any] = to_plain(current)
        return plain

    def _send_facts_now(self) -> None:
        """Make the current `poll` return at once, with the node's facts."""
        self._facts_sent_s = float("-inf")
        self._attempts.interrupt_wait()

    def start(self, generation: int, order: dict[str, Any], secrets: dict[str, str]) -> None:
        """Start the ranks of an Order on this node.

        Idempotent. Chooses the master address if the order has none. Raises EpochPast for an attempt that was
        superseded or stopped, FleetError if its fence cannot be read, and, as all calls that change something,
        ControllerSuperseded for an older controller.
        """
        self._generation.check_and_record(generation)
        try:
            parsed_order = Order.parse(order)
        except InvalidMessage as e:
            raise UserError(f"the order {e}", "install the same Polyfleet version on server and node") from None
        if not parsed_order.master_address:
            address, port = self.rendezvous_address()
            parsed_order = replace(parsed_order, master_address=address, master_port=port)
        visible_as = {
            str(d.index): str(d.properties["visible_as"]) for d in self._devices if "visible_as" in d.properties
        }
        interface = network_interfaces.local_interface(self.address())
        self._attempts.start(replace(parsed_order, visibility_names=visible_as), secrets, interface)
        if ScriptCheckpoint.of(parsed_order.task, parsed_order.arguments):
            self._script_checkpoints.start()

    def stop(self, generation: int, job: str, epoch: int, how: str) -> None:
        """Stop an attempt; `how` is one of STOPS in workers.protocol.messages.

        If the attempt has not started here, it never will.
        """
        self._generation.check_and_record(generation)
        self._attempts.stop(job, epoch, how)

    def poll(
        self,
        generation: int,
        cursors: dict[str, int],
        last_phases: dict[str, str],
        timeout_s: float,
        clock_s: float | None = None,
        gather_s: float = 0.0,
    ) -> dict[str, Any]:
        """Renew all leases and wait for changes. Returns at once for a new phase, else within `timeout_s`.

        Returns {"facts": NodeFacts or None, "reports": [AttemptStatus], "attempts": [key], "unreadable_output": {key:
        {"count", "reason"}}, "clock_s"}. `cursors` and `last_phases`, the newest that the caller has, are by key, which
        is `job.epoch.node_rank`. "attempts" lists every attempt of this node, "unreadable_output" those whose ranks
        wrote unreadable data. Events of ranks are collected for up to `gather_s`. So that leases hold until the next
        call, a call lasts at most a third of the shortest lease. `clock_s` is that of this node's last reply: leases
        are counted from it, so that a call that was late, or was held in a frozen process, does not extend any.
        """
        self._generation.check_and_record(generation)
        self._last_contact_s = time.monotonic()
        self._attempts.renew(clock_s)
        leases = [a.lease_s * SILENT_SHARE_OF_LEASE for a in self._attempts.live_attempts()]
        due_s = 0.0 if self._facts_sent_s == float("-inf") else timeout_s
        statuses = self._attempts.wait_for_changes(cursors, last_phases, min([due_s, *leases]), gather_s)
        if self._mirrors and any(status.phase == "ended" for status in statuses):
            for mirror in self._mirrors:
                mirror.search_now()
            self._facts_sent_s = float("-inf")  # the server must not take the node for idle before the search has ended
        fields = {
            "reports": [r.to_plain() for r in statuses],
            "attempts": self._attempts.keys(),
            "unreadable_output": self._attempts.unusable_data(),
        }
        return {"facts": self._facts_if_due(), **fields, "clock_s": lease.now_s()}

    def _facts_if_due(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if now - self._discovered_s >= DISCOVER_EVERY_S:
            threading.Thread(target=self._discover, name="discovery", daemon=True).start()
        return self._facts() if now - self._facts_sent_s >= SEND_FACTS_EVERY_S else None

    def remove_shared_files(self, generation: int, job: str, epoch: int) -> None:
        """Remove the ranks' folders, keep logs and records. Called once the controller has stored the outcome."""
        self._generation.check_and_record(generation)
        self._attempts.remove_rank_files(job, epoch)
        self._job_files.remove_empty(job, epoch)

    def remove_all_files(self, generation: int, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Remove records, logs and files of attempts of removed jobs. Returns the (job, epoch) removed."""
        self._generation.check_and_record(generation)
        removed_attempts = self._attempts.remove([(str(job), int(epoch)) for job, epoch in attempts])
        for job, epoch in removed_attempts:
            self._job_files.remove(job, epoch)
            self.remove_stored_files(job, epoch)
        return removed_attempts

    def copy_script_checkpoint(self, job: str, epoch: int, *arguments: Any) -> dict[str, Any]:
        """Prepare a script's checkpoint for an attempt that is about to start here. Returns {"found", "text"}.

        `arguments`: path and format of the checkpoint, then backend and number of the devices that will load it.
        """
        path, format, backend, count = arguments  # noqa: A001
        device = vendor(backend).torch_device
        return self._script_checkpoints.choose_for(job, int(epoch), path, format, device, int(count))

    def logs(self, job: str, epoch: int, rank: int, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Return complete lines of a rank's log from byte `offset`: {"data", "next", "more", "ended"}."""
        return self._attempts.log(job, epoch, rank, offset, limit_bytes)

    def log_tail_range(self, job: str, epoch: int, rank: int, count: int) -> dict[str, int]:
        """Return the byte range of the last `count` lines of a rank's log: {"start", "end"}."""
        return self._attempts.log_tail(job, epoch, rank, count)

    def measure(self, job: str, epoch: int, message: dict[str, Any], timeout_s: float) -> Any:
        """Send a request to the benchmark session of an attempt here.

        Raises NotFound; FleetError without a reply.
        """
        return request(self._attempts.folder(job, epoch), message, timeout_s)

    def rendezvous_address(self) -> tuple[str, int]:
        """Return the address and a free port of this node, where the ranks of an attempt can meet."""
        return self.address(), self.free_port()

    def free_port(self) -> int:
        """Return a TCP port that is free now."""
        with socket.socket() as s:
            s.bind((self.address(), 0))
            return int(s.getsockname()[1])

    def address(self) -> str:
        """Return the address at which other nodes reach this one."""
        ray = _ray()
        return str(ray.util.get_node_ip_address()) if ray else "127.0.0.1"

    def _watch_fences(self) -> None:
        """Renew leases or stop attempts by their fences while the controller is silent for a third of a lease.

        Must not end: otherwise all leases of this node would expire the next time the controller is silent.
        """
        while True:
            time.sleep(FENCE_EVERY_S)
            silent_s = time.monotonic() - self._last_contact_s
            try:
                due = [a for a in self._attempts.live_attempts() if silent_s > a.lease_s * SILENT_SHARE_OF_LEASE]
                fence.renew_or_stop(due, self._fences)
            except Exception:
                LOG.exception("fences could not be checked")


def _ray() -> Any:
    """Return the `ray` module if this process has joined a cluster, else None. Does not import Ray."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _read_store(key: str, limit_s: float) -> bytes | None:
    """Read a key of Ray's key-value store.

    Raises FenceUnreadable when it does not respond within `limit_s`.
    """
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    store: Any = internal_kv
    try:
        client = store.internal_kv_get_gcs_client()
        value: bytes | None = client.internal_kv_get(key.encode(), None, timeout=limit_s)
        return value
    except (RayError, RuntimeError, OSError, ValueError) as e:
        raise fence.FenceUnreadable(str(e)) from e
