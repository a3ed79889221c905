"""A vendor of an installed distribution in one process: validation, configuration, selection, discovery."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
BEGIN = """
import torch
import workers
from cluster.errors import SpecError, UserError

def refused(call):
    try:
        call()
    except UserError as e:
        return str(e)
    raise AssertionError("nothing was refused")
"""
VALIDATES = """
report = workers.validate(torch.nn.Linear(4, 2), "plaything:t1-8gb", torch.ones(1, 4))
assert report.ok and report.kind == "toy:T1-8GB", report
assert "memory" in report.checks_run and "operators" in report.checks_run, report
told = workers.validate(torch.nn.Linear(4, 2).half(), "toy:T1", torch.ones(1, 4).half())
(problem,) = [p for p in told.findings if p.check == "dtypes"]
assert problem.message == "float16 is not native on toy:T1 (documented): it is far slower", problem
known = workers.capabilities("toy:T1-16GB")
assert (known.dtypes["bfloat16"].value, known.dtypes["complex64"].value) == ("native", "absent")
assert known.dtypes["bfloat16"].source == "https://toys.example/docs"
said = refused(lambda: workers.validate(torch.nn.Linear(4, 2), "toy:T9", torch.ones(1, 4)))
assert said.startswith("unknown kind 'toy:T9'; did you mean 'toy:T1"), said
"""
SELECTS = """
profile = workers.HardwareDetector().detect()
assert [d.kind for d in profile.devices] == ["toy:T1-8GB", "toy:T1-8GB", "cpu"], profile.findings
info = profile.devices[0]
assert info.supported_dtypes == ("bfloat16", "bool", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
assert info.properties["matrix_cores"] and info.properties["shared_memory_per_block_bytes"] == 32 << 10
assert info.fp8_supported is False and profile.hardware_type == "toy"
assert workers.get_backend().BACKEND_NAME == "toy"
assert workers.get_backend("auto").BACKEND_NAME == "toy"
assert workers.BackendType.from_string("plaything") is workers.BackendType.TOY
assert workers.get_backend_info("toy")["available"]
assert "toy" in workers.list_available_backends()
assert workers.detect_best_backend(priority=["T1-Mini"]) == "toy" == workers.detect_best_backend(priority=["toy"])
assert workers.detect_best_backend(priority=["cpu"]) == "cpu"
"""
CONFIGURES = """
from workers import PolyfleetConfig
config = PolyfleetConfig(priority=["plaything"], backends=["toy"], toy={"precision": "bf16"})
assert (config.priority, config.backends, config.toy.precision) == (("toy",), ("toy",), "bfloat16")
assert "toy" in PolyfleetConfig().backends
assert workers.get_backend("toy", config=config).precision == "bfloat16"
assert "does not enable it" in refused(lambda: workers.get_backend("cpu", config=config))
said = refused(lambda: PolyfleetConfig(toy={"precison": "bf16"}))
assert said.startswith("toy.precison: unknown option 'precison'; did you mean 'precision'?"), said
said = refused(lambda: PolyfleetConfig(priority=["toi"]))
assert "did you mean 'toy'?" in said, said
"""
SUMMARY = """
workers.print_backend_summary()
"""


@pytest.fixture
def run(toy_vendor, tmp_path):
    folder = toy_vendor(tmp_path)

    def child(code, **variables):
        here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "POLYFLEET_HOME": str(tmp_path / "home")}
        env = os.environ | here | {"TOY_DEVICES": "2"} | variables
        done = subprocess.run([sys.executable, "-c", BEGIN + code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return child


def test_a_model_is_validated_for_it(run):
    run(VALIDATES)


def test_its_devices_are_found_ranked_and_chosen(run):
    run(SELECTS)


def test_the_configuration_names_it_and_has_a_section_for_it(run):
    run(CONFIGURES)


def test_its_section_may_stand_in_the_environment_and_in_the_file(run, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('[toy]\nprecision = "fp16"\n')
    read = "print(workers.PolyfleetConfig().toy.precision)"
    assert run(read, POLYFLEET_CONFIG_FILE=str(file)) == "float16\n"
    assert run(read, POLYFLEET_CONFIG_FILE=str(file), POLYFLEET_CONFIG__TOY__PRECISION="bf16") == "bfloat16\n"


def test_the_summary_lists_it_with_its_devices(run):
    assert "toy      recommended\n     cpu" in run(SUMMARY)


def test_a_discovery_that_fails_is_a_finding_and_costs_nobody_else(run, tmp_path):
    (tmp_path / "toy_vendor" / "discovery.py").write_text("raise ImportError('no toy library')")
    told = run("print([(f.subject, f.message, f.remedy) for f in workers.HardwareDetector().detect().findings])")
    assert "('toy', 'looking for Toy accelerator devices failed: ImportError: no toy library', 'run toy-smi by" in told


def test_a_discovery_that_tells_another_vendors_devices_is_a_finding(run, tmp_path):
    file = tmp_path / "toy_vendor" / "discovery.py"
    file.write_text(file.read_text().replace('Device("toy"', 'Device("nvidia"'))
    told = run("p = workers.HardwareDetector().detect(); print([d.backend for d in p.devices], p.findings)")
    assert told.startswith("['cpu']")
    assert "it reported devices of nvidia" in told
