"""What Triton's configurations take: the committed table, and compiling ahead of time without a device."""

import json

import pytest

from cluster.errors import UserError
from workers.errors import KernelsUnavailable
from workers.kernels.compilation import resources
from workers.kernels.compilation import triton_committed as committed
from workers.kernels.compilation import triton_table as table
from workers.kernels.compilation.resources import KernelResources, refusal_reason
from workers.kernels.compilation.triton_table import Config

SM_90, MI300 = table.TARGETS["sm_90"], table.TARGETS["gfx942"]
DATA = json.loads(committed.COMMITTED.read_text())
NORM = Config("rmsnorm_rows", (1, 4096), 4)


@pytest.fixture
def compiler(absent, tmp_path, monkeypatch):
    """Compiles for real; what it remembers is the test's own."""
    try:
        resources.installed()
    except KernelsUnavailable as e:
        absent("triton", str(e))
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    return resources


def test_the_committed_table_is_of_the_present_sources():
    again = "compile it anew: python -m workers.kernels.compilation.resources, with Triton 3.7.1 and then 3.8.0"
    assert DATA["sources"] == resources.source_hashes(), again


@pytest.mark.parametrize("version", ((3, 7), (3, 8)), ids=("3.7", "3.8"))
@pytest.mark.parametrize("name", table.COMMITTED)
def test_every_configuration_that_may_be_launched_is_in_it_and_none_spills(name, version):
    on = table.TARGETS[name]
    for dtype, itemsize in resources.DTYPES.items():
        lines = DATA["lines"][f"{name} {dtype}"]
        for config in table.configs(on, itemsize, version):
            assert str(config) in lines, f"{name} {dtype} {config} was not compiled"
            assert refusal_reason(config, on, *lines[str(config)]) == ""


def test_the_page_shows_the_committed_table():
    assert committed.PAGE.read_text() == committed.page(DATA), (
        "python -m workers.kernels.compilation.resources writes it"
    )


@pytest.mark.parametrize(
    ("config", "on", "numbers", "told"),
    [
        (Config("rmsnorm_rows", (1, 65536), 32), MI300, (64, 0, 0), "2048 threads; gfx942 allows 1024"),
        (NORM, SM_90, (255, 3, 0), "spills 3 registers"),
        (NORM, SM_90, (300, 0, 0), "300 registers per thread; sm_90 has 255"),
        (NORM, MI300, (64, 0, 65537), "65537 bytes of shared memory; gfx942 allows 65536"),
        (Config("rmsnorm_rows", (1, 65536), 16, ctas=4), MI300, (64, 0, 0), "a cluster of 4; gfx942 allows none"),
        (Config("rmsnorm_rows", (1, 262144), 16, ctas=16), SM_90, (64, 0, 0), "a cluster of 16; sm_90 allows 8"),
        (NORM, SM_90, (64, 0, 1024), ""),
    ],
)
def test_what_exceeds_a_target_is_not_allowed(config, on, numbers, told):
    assert refusal_reason(config, on, *numbers).startswith(told)
    assert bool(refusal_reason(config, on, *numbers)) == bool(told)


def test_the_oldest_triton_has_lines_of_its_own_and_what_spills_there_is_not_launched():
    pytest.importorskip("torch")
    from workers.kernels.drivers.triton_launch import DTYPE_NAMES, check_committed

    older = DATA["older"]
    assert older["triton"] == "3.4.0" and older["sources"] == resources.source_hashes()
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    for at, lines in older["lines"].items():
        on, dtype = table.TARGETS[at.split()[0]], dtypes[at.split()[1]]
        assert lines.keys() == {str(one) for one in table.configs(on, resources.DTYPES[at.split()[1]], (3, 4))}
        for config in table.configs(on, resources.DTYPES[at.split()[1]], (3, 4)):
            line = lines[str(config)]
            if line[0] and not on.refusal_reason(*line):
                check_committed(config, dtype, on, (3, 4))
                continue
            with pytest.raises(UserError, match=r"with Triton 3\.4: it is not launched"):
                check_committed(config, dtype, on, (3, 4))
            check_committed(config, dtype, on, (3, 7))


def test_a_launch_is_refused_that_the_committed_table_does_not_hold():
    torch = pytest.importorskip("torch")
    from workers.kernels.drivers.triton_launch import check_committed

    known = table.rows("rmsnorm", 4096, SM_90, (3, 7))
    check_committed(known, torch.bfloat16, SM_90)
    with pytest.raises(UserError, match="has not been compiled ahead of time for sm_90"):
        check_committed(Config("rmsnorm_rows", (1, 65536), 32), torch.bfloat16, SM_90)


def test_a_planted_configuration_that_spills_is_found_and_not_written(compiler):
    """65,536 columns in the registers of one program: the cliff that clusters and loops are for."""
    [row] = compiler.compile_configurations([KernelResources("sm_90", "bf16", Config("rmsnorm_rows", (1, 65536), 16))])
    assert row.spills > 0
    assert compiler.refused_rows([row]) == [row]
    with pytest.raises(UserError, match=r"1 configurations must not be launched.*spills"):
        committed.data_of([row])


def test_too_many_threads_compile_and_are_refused(compiler):
    [row] = compiler.compile_configurations([KernelResources("gfx942", "bf16", Config("softmax_rows", (1, 32768), 32))])
    assert (row.spills, row.threads) == (0, 2048)
    assert "2048 threads" in row.refused


def test_what_does_not_compile_is_told(compiler):
    [row] = compiler.compile_configurations([KernelResources("sm_90", "bf16", Config("silu", (1000,), 4))])
    assert row.refused.startswith("does not compile: ")


def test_what_was_compiled_is_remembered_and_a_cut_line_is_not(compiler, tmp_path):
    """And it gives what is committed, of the same compiler."""
    jobs = [
        KernelResources(name, "bf16", table.rows("rmsnorm", 4096, table.TARGETS[name], (3, 7)))
        for name in ("sm_90", "gfx942")
    ]
    told = []
    first = compiler.compile_configurations(jobs, lambda done, of: told.append((done, of)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    with (tmp_path / "measured" / "kernel-resources.jsonl").open("a") as file:
        file.write('{"key": "3.7')
    told.clear()
    assert compiler.compile_configurations(jobs, lambda done, of: told.append((done, of))) == first
    assert told == [(2, 2)]
    if resources.installed() == "3.7.1":
        lines = [DATA["lines"][f"{row.target} bf16"][str(row.config)] for row in first]
        assert lines == [[row.registers, row.spills, row.shared_bytes] for row in first]


def test_targets_nobody_can_compile_for_are_told(compiler):
    with pytest.raises(UserError, match="unknown target 'sm_91'"):
        compiler.compile_report(["sm_91"])
    with pytest.raises(UserError, match="can report its registers"):
        compiler.compile_report(["xpu"])
