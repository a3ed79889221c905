"""True of the whole tree: where imports point, what is not called, how long things get, that links lead somewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cluster", "workers", "orchestrator")  # each may import those before it
PRODUCT = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

CORE = "orchestrator/core/"
SIMULATOR = "orchestrator/simulation/"
TELLING = {
    *("model", "states", "throughput", "timing", "jobs.fold", "jobs.remaining_time", "step.control"),
    "attempt.story",
    *(f"controller.{name}" for name in ("attempts", "commands", "draft", "messages", "nodes", "scaling")),
    *(f"explanation.{name}" for name in ("explain", "offer", "waiting_queue", "what_if")),
}
"""Modules of the core that say what things are, and the one function `step`. All others decide."""
TOLD_BY_DECIDING = {
    "orchestrator.core.attempt.suspicion.waiting_reason",
    "orchestrator.core.plan.options.fit.ANY",
    "orchestrator.core.fleet.leaked_devices.Leak",
    "orchestrator.core.fleet.leaked_devices.list_leaks",
    "orchestrator.core.step.placement.devices_of",
    "orchestrator.core.step.placement.snapshot",
    "orchestrator.core.plan.arrays.completion.MIN_SHARED_WORKLOADS",
    "orchestrator.core.plan.arrays.completion.estimate_rates",
    "orchestrator.core.plan.policies.plugins.INSTALLED",
    "orchestrator.core.plan.policies.plugins.Plugin",
    "orchestrator.core.plan.policies.policy_input.PolicyInput",
    "orchestrator.core.jobs.progress.devices_of",
    "orchestrator.core.plan.options.quota.holdings",
    "orchestrator.core.jobs.progress.device_seconds_by_kind",
}
"""What modules that decide say to whoever shows it."""
# Without a clock, a thread, chance or a file: the same arguments give the same answer. Paths are text there.
CORE_MAY_IMPORT = (
    *("bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "operator.attrgetter", "typing"),
    "pathlib.PurePosixPath",
    *("cluster.catalogue", "cluster.errors", "cluster.former_names", "cluster.serialization", "cluster.types"),
    *("workers.protocol.messages", "workers.protocol.failure_kinds", "orchestrator.core"),
)
WITH_ARRAYS = tuple(f"orchestrator/core/plan/{folder}/" for folder in ("arrays", "assignment", "policies"))
CORE_MAY_NOT_CALL = {"open", "print", "input", "id", "hash", "__import__", "breakpoint"}
# Of workers, the orchestrator takes messages and pure data; the agent's class only where the actor is made.
OF_WORKERS = (
    "workers.protocol.messages",
    "workers.protocol.failure_kinds",
    "workers.errors",
    "workers.protocol.rank_events",
    "workers.devices.discovery",
    "workers.benchmark.cases.case",
    "workers.benchmark.cases.catalogue",
    "workers.benchmark.host",
    "workers.benchmark.session_server",
    "workers.measurement.statistics",
    "workers.devices.capability.documented",
    "workers.kernels.names",
    "workers.kernels.compilation.resources",
    "workers.models.memory.estimate",
    "workers.options.device_preference",
    "workers.checkpoint.format.manifest",
    "workers.checkpoint.disk.inspect",
    "workers.checkpoint.tool_table",
    "workers.checkpoint.tools",
)
# Preparing, estimating and validating models are functions over a back end: a back end knows nothing of them.
ABOVE_BACKENDS = ("workers.models", "workers.measurement", "workers.kernels", "workers.tasks", "workers.benchmark")
AGENT_FROM = "orchestrator/runtime/agents/"
TORCH_FROM = (
    *("workers/devices/backends/", "workers/devices/capability/", "workers/devices/libraries/", "workers/measurement/"),
    *("workers/benchmark/", "workers/checkpoint/", "workers/kernels/", "workers/models/", "workers/tasks/"),
)
RAY_FROM = ("workers/node/agent.py", "orchestrator/runtime/agents/", "cluster/nodes/")
# A vendor's library is imported by the files of that vendor (named so), inside a function: on first use.
VENDORS = {
    "pynvml": ("nvidia", "nvidia_state"),
    "amdsmi": ("amd_smi",),
    "torch_xla": ("tpu", "xla"),
    "triton": ("triton", "triton_compile", "triton_launch"),
    "pyopencl": ("opencl_driver",),
    "wgpu": ("webgpu_adapters",),
    "jax": ("pallas", "pallas_driver"),
    "jaxlib": ("pallas", "pallas_driver"),
    "torch_tpu": ("tpu",),
    "torch_neuronx": ("neuron",),
    "intel_extension_for_pytorch": ("intel", "cpu"),
}
# Kernels in a vendor's own language, which import it; nobody imports these but on first use.
SOURCES = "workers/kernels/sources/"
SOURCES_OF = {"triton": "triton_", "jax": "pallas_"}
# The one reader of strangers' pickles: it imports nothing they name and calls nothing, and a test of its own says so.
READS_PICKLES_AS_DATA = "workers/checkpoint/exchange/pickles/pickle_symbols.py"
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FUNCTIONS_THAT_MAY_BE_LONGER = 5
LONGEST_FUNCTION_LINES = 90


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Line, full module name, and whether it happens as soon as the file is imported."""
    at_once = {id(node) for node in nodes_run_on_import(tree(path))}
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}", id(node) in at_once) for alias in node.names]
    return tuple(found)


def nodes_run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """All but expressions, bodies of functions, and what is for the type checker."""
    below = [node]
    while below:
        for child in ast.iter_child_nodes(below.pop()):
            if isinstance(child, ast.expr | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            below.append(child)


def full_name(function: ast.expr, path: Path) -> str:
    """`x.load` as its module: `strict_yaml.load` is cluster.input.strict_yaml.load."""
    first, dot, rest = ast.unparse(function).partition(".")
    modules = [module for _, module, _ in imports(path) if module.split(".")[-1] == first]
    return f"{modules[0] if modules else first}{dot}{rest}"


def is_in(module: str, wanted: str) -> bool:
    return module == wanted or module.startswith(f"{wanted}.")


def repository_files() -> list[Path]:
    """What is committed or would be."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / line for line in listing.stdout.decode().split("\0") if line]
    return [path for path in paths if path.is_file()]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8000]:
            yield path, content.decode()


def test_imports_point_down_only():
    upward = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        for line, module, _ in imports(path)
        for above in PACKAGES[PACKAGES.index(path.relative_to(ROOT).parts[0]) + 1 :]
        if is_in(module, above)
    ]
    assert not upward, "\n".join(upward)


def test_the_orchestrator_takes_only_messages_and_data_of_the_workers():
    more = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        if name(path).startswith("orchestrator/")
        for line, module, _ in imports(path)
        if is_in(module, "workers")
        and not any(is_in(module, allowed) for allowed in OF_WORKERS)
        and not (is_in(module, "workers.node.agent") and name(path).startswith(AGENT_FROM))
    ]
    assert not more, "\n".join(more)


def test_what_carries_the_controllers_commands_out_decides_nothing():
    """Only the core, and the simulator that plays with it, call what decides about attempts and places."""
    files = (path.relative_to(ROOT / CORE) for path in (ROOT / CORE).rglob("*.py") if path.stem != "__init__")
    parts = {".".join(path.with_suffix("").parts) for path in files}
    assert parts >= TELLING
    deciding = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        if name(path).startswith("orchestrator/") and not name(path).startswith((CORE, SIMULATOR))
        for line, module, _ in imports(path)
        if any(is_in(module, f"orchestrator.core.{part}") for part in parts - TELLING)
        and module not in TOLD_BY_DECIDING
    ]
    assert not deciding, "\n".join(deciding)


def test_the_core_has_no_clock_no_thread_no_chance_and_no_file():
    core = [path for path in PRODUCT if name(path).startswith(CORE)]
    impure = [
        f"{name(path)}:{line} imports {module}"
        for path in core
        for line, module, _ in imports(path)
        if not any(is_in(module, allowed) for allowed in CORE_MAY_IMPORT)
        and not (is_in(module, "numpy") and name(path).startswith(WITH_ARRAYS))
    ]
    impure += [f"{name(path)} uses np.random" for path in core if "np.random" in path.read_text()]
    for path in core:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CORE_MAY_NOT_CALL:
                impure.append(f"{name(path)}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.ImportFrom) and node.level:
                impure.append(f"{name(path)}:{node.lineno} imports by a relative name")
    assert not impure, "\n".join(impure)


def test_back_ends_import_nothing_of_what_is_done_to_models():
    upward = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        if name(path).startswith("workers/devices/backends/")
        for line, module, _ in imports(path)
        for above in ABOVE_BACKENDS
        if is_in(module, above)
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("library, places", [("torch", TORCH_FROM), ("ray", RAY_FROM)])
def test_torch_and_ray_are_imported_only_in_their_places(library, places):
    elsewhere = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        for line, module, _ in imports(path)
        if is_in(module, library) and not name(path).startswith(places)
    ]
    assert not elsewhere, "\n".join(elsewhere)


def test_vendor_libraries_are_imported_by_their_vendors_files_on_first_use():
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        for line, module, at_once in imports(path)
        for library, stems in VENDORS.items()
        if is_in(module, library)
        and not (library in SOURCES_OF and name(path).startswith(SOURCES + SOURCES_OF[library]))
        and (at_once or path.stem not in stems or not name(path).startswith("workers/"))
    ]
    wrong += [
        f"{name(path)}:{line} imports {module}"
        for path in PRODUCT
        for line, module, at_once in imports(path)
        if at_once and not name(path).startswith(SOURCES) and is_in(module, SOURCES.rstrip("/").replace("/", "."))
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_runs_code_by_reading_data():
    unsafe = []
    for path in PRODUCT:
        unsafe += [
            f"{name(path)}:{line} {module}"
            for line, module, _ in imports(path)
            if module.split(".")[0] in UNSAFE_MODULES and name(path) != READS_PICKLES_AS_DATA
        ]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and (called := full_name(node.func, path)) in UNSAFE_CALLS:
                unsafe.append(f"{name(path)}:{node.lineno} {called}()")
            if isinstance(node, ast.keyword) and node.arg == "shell" and getattr(node.value, "value", None) is True:
                unsafe.append(f"{name(path)}:{node.value.lineno} shell=True")
    assert not unsafe, "\n".join(unsafe)


def test_files_are_short_enough_to_be_read():
    long = [f"{name(path)}: {n} lines" for path in PRODUCT if (n := path.read_text().count("\n")) > MAX_FILE_LINES]
    assert not long, "\n".join(long)


def test_almost_no_function_is_long_and_none_very():
    lengths = {
        f"{name(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PRODUCT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {where: lines for where, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert len(long) <= FUNCTIONS_THAT_MAY_BE_LONGER, long
    assert max(long.values(), default=0) <= LONGEST_FUNCTION_LINES, long


def test_no_folder_of_tests_is_a_package():
    """It would hide ours of the same name: tests/cluster/__init__.py is a package `cluster`. We have no `chaos`,
    `end_to_end` and `machines`, and what their fixtures start ends with these packages."""
    found = sorted(name(path) for path in (ROOT / "tests").rglob("__init__.py"))
    assert found == [f"tests/{package}/__init__.py" for package in ("chaos", "end_to_end", "machines")]


def test_no_file_holds_a_path_of_the_machine_it_was_written_on():
    here = {str(ROOT), f"{Path.home()}/", f"{sys.base_prefix}/"} - {"//", "/usr/"}
    found = [
        f"{name(path)}:{number}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if any(prefix in line for prefix in here)
    ]
    assert not found, "\n".join(found)


def test_every_relative_link_in_the_documents_leads_somewhere():
    link = re.compile(r"\]\(([^)\s]+)\)")
    dead = []
    for path, text in text_files():
        if path.suffix == ".md":
            prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
            for target in link.findall(prose):
                place = target.split("#")[0]
                if (
                    place
                    and "://" not in place
                    and not place.startswith("mailto:")
                    and not (path.parent / place).exists()
                ):
                    dead.append(f"{name(path)}: {target}")
    assert not dead, "\n".join(dead)


def test_every_direct_dependency_has_its_reason_written_down():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[A-Za-z0-9-]+", line).group().lower() for group in groups for line in group} - {"polyfleet"}
    reasons = (ROOT / "docs" / "decisions" / "0007-dependencies.md").read_text()
    assert names == set(re.findall(r"^\| ([a-z0-9-]+) \| \S", reasons, re.MULTILINE)) - {"package"}
