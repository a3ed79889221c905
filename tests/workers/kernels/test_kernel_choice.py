"""Kernels by name, with fallbacks, with memory, and the fastest that was measured."""

import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from kernel_cases import CASES, check, draw

from cluster.errors import UserError
from workers import init_kernels, list_kernels
from workers import kernels as registry
from workers.errors import KernelsUnavailable, NotEnoughMemory
from workers.kernels.dispatch import tuner
from workers.kernels.dispatch.attention_choice import measured_order
from workers.kernels.dispatch.classes import shape_class
from workers.kernels.dispatch.fastest import Fastest
from workers.kernels.dispatch.kernel_choice import get_kernels_info
from workers.kernels.dispatch.probes import Probe
from workers.kernels.dispatch.tuner import KernelMeasurement, Situation, fastest_choices, software_of
from workers.kernels.implementations import numpy as reference
from workers.measurement import measurement_files

pytestmark = pytest.mark.full

PLUGIN = """
from workers.kernels.implementations.numpy import Kernels as Base

class Kernels(Base):
    name = "toy"

class Absent(Base):
    name = "absent"

    @classmethod
    def unavailable_reason(cls):
        return "its chip is not here"
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Another distribution, as pip would install it, with kernels that compute, that are absent and that are broken."""
    (tmp_path / "toy_kernels.py").write_text(PLUGIN)
    metadata = tmp_path / "toy_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[polyfleet.kernels]\ntoy = toy_kernels:Kernels\nabsent = toy_kernels:Absent\n"
        "broken = toy_kernels:Nothing\nnumpy = toy_kernels:Kernels\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


def test_importing_the_registry_imports_neither_torch_nor_a_driver():
    drivers = "{'torch', 'pyopencl', 'wgpu', 'triton', 'jax'}"
    code = f"import sys, workers.kernels as k; k.names(); print(*sorted({drivers} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_kernels_of_another_distribution_are_found_and_a_name_of_ours_stays_ours(outside):
    assert {"toy", "absent", "broken"} < {*registry.names()}
    assert init_kernels("toy").name == "toy"
    assert type(init_kernels("numpy")) is reference.Kernels
    assert "toy" in list_kernels() and "absent" not in list_kernels()


def test_a_broken_entry_point_is_told_and_spoils_nothing(outside):
    with pytest.raises(KernelsUnavailable, match="kernels 'broken' are not available here: its file does not load"):
        init_kernels("broken")
    assert "toy" in list_kernels()
    assert get_kernels_info("broken")["available"] is False


def test_an_unknown_name_is_told_the_nearest_also_among_fallbacks():
    with pytest.raises(UserError, match="unknown kernels 'trition'; "):
        init_kernels("trition")
    with pytest.raises(UserError, match="unknown kernels 'nunpy'; did you mean 'numpy'"):
        init_kernels("numpy", fallback=["nunpy"])


def test_what_is_absent_raises_with_its_reason_and_a_fallback_takes_its_place(outside, caplog):
    with pytest.raises(KernelsUnavailable, match="its chip is not here; run `polyfleet backends --kernels`"):
        init_kernels("absent")
    with caplog.at_level("WARNING", "polyfleet"):
        found = init_kernels("absent", fallback=["broken", "toy"])
    assert (found.name, found.fallback_from, found.fallback_reason) == ("toy", "absent", "its chip is not here")
    assert "using kernels toy instead of absent: its chip is not here" in caplog.text
    with pytest.raises(KernelsUnavailable, match=r"no fallback can be used either \(absent: .*; broken: "):
        init_kernels("absent", fallback="broken")


def test_memory_that_is_not_there_is_refused_with_numbers():
    assert init_kernels("numpy", bytes_needed=1 << 20).name == "numpy"
    with pytest.raises(NotEnoughMemory, match=r"cpu: \d+\.\d\d GiB free, \d+\.\d\d missing"):
        init_kernels("numpy", bytes_needed=1 << 60)
    with pytest.raises(UserError, match="bytes_needed is -1"):
        init_kernels("numpy", bytes_needed=-1)


def line(kernels, speedup=2.0, low=1.5, right=True, software=None, **situation):
    given = {"kind": Fastest("cpu").kind, "operation": "softmax", "dtype": "float32", "shapes": "64+x4096"} | situation
    software = software_of(registry.create(kernels)) if software is None else software
    return KernelMeasurement(Situation(**given), kernels, software, speedup, low, speedup + 1, right)


class TestFastest:
    def test_without_measurements_torchs_own_are_taken(self, home):
        assert init_kernels().choices() == {}
        torch.testing.assert_close(init_kernels("auto").softmax(draw(100, 4096)), draw(100, 4096).softmax(-1))

    def test_the_fastest_right_one_is_taken_in_its_situation_only(self, home, outside):
        for one in (
            line("toy", 3.0),
            line("toy", 9.0, right=False, operation="silu"),
            line("toy", 1.2, low=0.9, dtype="float16"),
        ):
            assert tuner.store_measurement(one)
        k = init_kernels("auto")
        assert {(s.operation, s.dtype): name for s, name in k.choices().items()} == {("softmax", "float32"): "toy"}
        assert k.select("softmax", draw(64, 3000)).name == "toy"
        for other in (draw(63, 3000), draw(64, 5000), draw(64, 3000).half()):
            assert k.select("softmax", other).name == "torch"
        assert k.select("silu", draw(64, 3000)).name == "torch"

    def test_what_other_software_measured_does_not_count(self, home, outside):
        tuner.store_measurement(line("toy", software="0123456789abcdef"))
        assert init_kernels().choices() == {}

    def test_a_later_measurement_replaces_an_earlier_one(self, home, outside):
        tuner.store_measurement(line("toy", 3.0))
        tuner.store_measurement(line("toy", 0.8, low=0.7))
        assert init_kernels().choices() == {}

    def test_what_is_chosen_stays_while_measurements_are_added(self, home, outside):
        k = init_kernels()
        tuner.store_measurement(line("toy", 3.0))
        assert k.select("softmax", draw(64, 3000)).name == "torch"
        assert init_kernels().select("softmax", draw(64, 3000)).name == "toy"

    def test_it_computes_what_the_chosen_ones_compute(self, home, outside):
        for operation in ("rmsnorm", "softmax", "apply_rope", "matmul", "attention", "matmul_vec"):
            for case in (
                c for c in CASES if c.operation == operation and c.name in ("3x13", "halves-partial", "grouped")
            ):
                arrays = [one.shape for one in case.make() if isinstance(one, torch.Tensor)]
                tuner.store_measurement(
                    line("toy", operation=operation, shapes=shape_class(operation, *(*arrays, ())[:2]))
                )
        k = init_kernels()
        assert len(k.choices()) >= 3
        for case in CASES[::7]:
            check(k, case, torch.float32)

    def test_gradients_are_computed_by_what_is_chosen_for_them(self, home, outside, monkeypatch):
        rows, heads = draw(64, 128), draw(1, 2, 64, 64)
        result, lse = init_kernels("torch").attention(heads, heads, heads, return_lse=True)
        arguments = {
            "rmsnorm": (rows, draw(128)), "layernorm": (rows, draw(128), draw(128)), "softmax": (rows.softmax(-1),),
            "silu": (rows,), "swiglu": (rows, rows), "attention": (heads, heads, heads, result, lse),
        }  # fmt: skip
        expected, called = {}, []
        for operation, arrays in arguments.items():
            expected[operation] = getattr(init_kernels("torch"), f"{operation}_backward")(arrays[0], *arrays)
            shapes = shape_class(operation, *([heads.shape] * 2 if operation == "attention" else [rows.shape, ()]))
            tuner.store_measurement(line("toy", operation=operation, shapes=shapes, gradient=True))
            hook = getattr(registry.load("toy"), f"_{operation}_backward")
            noted = lambda *given, hook=hook: called.append(hook.__name__) or hook(*given)  # noqa: E731
            monkeypatch.setattr(registry.load("toy"), hook.__name__, noted)
        for operation, arrays in arguments.items():
            given = getattr(init_kernels("auto"), f"{operation}_backward")(arrays[0], *arrays)
            torch.testing.assert_close(given, expected[operation], rtol=1e-5, atol=5e-5)  # sums of another order
        assert called == [f"_{operation}_backward" for operation in arguments]


class TestMeasurements:
    def test_lines_that_were_cut_or_are_nonsense_are_passed_over(self, home, outside):
        tuner.store_measurement(line("toy", 3.0))
        with measurement_files.path(tuner.NAME).open("a") as file:
            file.write('{"kind": 3}\n[]\n"x"\n{"kind": "cpu", "operation": "softmax", "dtype"\n\0\n')
        tuner.store_measurement(line("toy", 4.0, operation="silu"))
        assert [one.speedup for one in tuner.read_measurements()] == [3.0, 4.0]

    def test_a_home_that_cannot_be_written_costs_the_line_alone(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "file"))
        assert not tuner.store_measurement(line("numpy"))
        assert init_kernels().choices() == {}

    def test_processes_that_write_at_once_lose_no_line(self, home):
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=_write, args=(str(number),)) for number in range(4)]
        for one in writers:
            one.start()
        for one in writers:
            one.join()
        assert len(measurement_files.lines("many")) == 4 * 200

    def test_old_lines_are_forgotten_when_there_are_too_many(self, home, monkeypatch):
        monkeypatch.setattr(measurement_files, "MAX_FILE_BYTES", 2000)
        for number in range(200):
            measurement_files.add("few", {"number": number})
        kept = measurement_files.lines("few")
        assert kept[-1] == {"number": 199} and len(kept) < 200
        assert measurement_files.path("few").stat().st_size <= 2100


def _write(name):
    for number in range(200):
        measurement_files.add("many", {"name": name, "number": number})


def _rank(rank, world, folder):
    import torch.distributed as dist

    os.environ["POLYFLEET_HOME"] = f"{folder}/{rank}"  # each rank's node has a home of its own
    os.environ["POLYFLEET_NATIVE"] = "off"  # nothing is compiled anew for either home
    if rank == 1:
        tuner.store_measurement(line("numpy", 3.0, shapes="64+x4096"))
        tuner.store_measurement(line("torch:math", 3.0, operation="attention", shapes="prefill-s256-d16"))
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    choices = {s.operation: name for s, name in init_kernels().choices().items()}
    heads = draw(1, 2, 32, 16)
    choices["torch"] = init_kernels("torch").attention_variant(heads, heads, heads.dtype, False)
    choices["order"] = measured_order(torch.device("cpu"))
    (folder / f"{rank}.json").write_text(json.dumps(choices))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_take_what_the_first_that_came_has_chosen(tmp_path):
    torch.multiprocessing.spawn(_rank, (2, tmp_path), nprocs=2)  # raises the error of the first rank that fails
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second


def test_classes_tell_rows_and_columns_apart():
    assert shape_class("rmsnorm", (1, 4096)) == "1x4096"
    assert shape_class("rmsnorm", (4, 8, 4097)) == "2-63x8192"
    assert shape_class("silu", (64, 7)) == "64+x256"
    assert shape_class("softmax", (64, 1 << 20)) == "64+x131072"
    assert shape_class("matmul", (8, 16, 512), (512, 300)) == "64+x512x512"
    assert shape_class("attention", (1, 8, 1, 64), (1, 2, 900, 64)) == "decode-s1024-d64"
    assert shape_class("attention", (1, 8, 5, 64), (1, 2, 900, 64)) == "prefill-s1024-d64"


def test_tuning_measures_checks_and_remembers(home, outside):
    from workers.kernels.dispatch import comparison

    told = []
    found = comparison.tune(
        ["matmul_vec"], ["toy"], dtypes=[torch.float32], compiled=False, rounds=6, on_result=told.append
    )
    assert found == told == tuner.read_measurements()
    assert {one.situation.operation for one in found} == {"matmul_vec"}
    assert all(one.right and one.speedup > 0 for one in found)


def measured_silu():
    """Two sizes: those that `tune` takes give the toy, which computes in float64, seconds of work."""
    from workers.kernels.dispatch import comparison

    cases = [(Probe("silu", ((rows, 130),)), torch.float32) for rows in (70, 3)]
    return comparison.measure(cases, [registry.create("toy")], torch.device("cpu"), rounds=6)


def test_tuning_never_chooses_what_changes_its_arguments_after_a_few_calls(home, outside, monkeypatch):
    right, calls = registry.load("toy")._silu, []

    def late(self, x, out):
        right(self, x, out)
        calls.append(x)
        if len(calls) == 3:
            x.mul_(2)

    monkeypatch.setattr(registry.load("toy"), "_silu", late)
    found = measured_silu()
    assert not found[0].right and found[1].right


def test_tuning_never_chooses_what_is_wrong(home, outside, monkeypatch):
    monkeypatch.setattr(registry.load("toy"), "_silu", lambda self, x, out: out.copy_(x))
    found = measured_silu()
    assert found and not any(one.right for one in found)
    assert fastest_choices(found[0].situation.kind, {"toy": found[0].software}) == {}


def measured(probe, dtype=torch.float32):
    from workers.kernels.dispatch import comparison

    found = comparison.measure([(probe, dtype)], [registry.create("toy")], torch.device("cpu"), rounds=6)
    return {one.situation.gradient: one.right for one in found}


def test_gradients_of_rope_are_measured_although_its_kernel_is_the_forwards(home, outside):
    assert measured(Probe("apply_rope", ((1, 2, 9, 16), (9, 8), (9, 8)))) == {False: True, True: True}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_tuning_checks_gradients_too(home, outside, monkeypatch, dtype):
    gradients = {
        "rmsnorm": Probe("rmsnorm", ((70, 130), (130,))), "layernorm": Probe("layernorm", ((70, 130), (130,), (130,))),
        "softmax": Probe("softmax", ((70, 130),)), "silu": Probe("silu", ((70, 130),)),
        "swiglu": Probe("swiglu", ((70, 130), (70, 130))),
        "attention": Probe("attention", ((1, 4, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)), causal=True),
    }  # fmt: skip
    monkeypatch.setattr(registry.load("toy"), "own_gradients", frozenset(gradients))
    for probe in gradients.values():
        assert measured(probe, dtype) == {False: True, True: True}
    right = registry.load("toy")._rmsnorm_backward

    def loses_a_row(self, g, x, *rest):
        grad, weight = right(self, g, x, *rest)
        return grad, weight - g[-1] * x[-1]

    monkeypatch.setattr(registry.load("toy"), "_rmsnorm_backward", loses_a_row)
    assert measured(gradients["rmsnorm"], dtype) == {False: True, True: False}


@pytest.mark.parametrize(
    ("given", "told"),
    [((["slu"], []), "unknown operation 'slu'; did you mean 'silu'"), (([], ["absent"]), "its chip is not here")],
)
def test_tuning_refuses_what_it_cannot_measure(home, outside, given, told):
    from workers.kernels.dispatch import comparison

    with pytest.raises(UserError, match=told):
        comparison.tune(*given)
