"""`polyfleet backends --kernels` and `polyfleet kernels …`."""

import json

import pytest

pytestmark = pytest.mark.full


def test_backends_lists_kernels_with_what_they_compute_or_why_not(here):
    done = here("backends", "--kernels")
    assert done.returncode == 0
    rows = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert rows["numpy"] == rows["torch"] == "✓"
    listed = json.loads(here("backends", "--kernels", "-o", "json").stdout)
    assert {row["name"] for row in listed} == {*rows}
    assert all(row["available"] or row["reason"] for row in listed)


def test_tune_tells_each_measurement_and_remembers_it(here, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    done = here("kernels", "tune", "matmul_vec", "--kernels", "numpy", "--dtypes", "fp32", "-o", "json")
    rows = json.loads(done.stdout)
    assert {(row["operation"], row["kernels"], row["dtype"]) for row in rows} == {("matmul_vec", "numpy", "float32")}
    assert "matmul_vec float32 64+x1024x1 by numpy: 0." in done.stderr
    kept = [json.loads(line) for line in (tmp_path / "measured" / "kernels.jsonl").read_text().splitlines()]
    assert kept == rows


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rmsnom"], "unknown operation 'rmsnom'; did you mean 'rmsnorm'?"),
        (["--kernels", "nunpy"], "unknown kernels 'nunpy'; did you mean 'numpy'?"),
        (["--dtypes", "bf17"], "unknown dtype 'bf17'; did you mean 'bf16'?"),
        (["--device", "nowhere"], "'nowhere' is not a device; write a torch device"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_nearest(here, arguments, told):
    done = here("kernels", "tune", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {told}")


@pytest.fixture
def compiler(absent):
    from workers.errors import KernelsUnavailable
    from workers.kernels.compilation import resources

    try:
        resources.installed()
    except KernelsUnavailable as e:
        absent("triton", str(e))


def test_resources_compiles_for_devices_that_are_not_here(here, compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    done = here("kernels", "resources", "silu", "--target", "sm_80,gfx942", "-o", "json")
    rows = json.loads(done.stdout)
    assert done.returncode == 0
    assert {(row["target"], row["dtype"], row["kernel"]) for row in rows} == {
        (target, dtype, "silu") for target in ("sm_80", "gfx942") for dtype in ("fp32", "bf16", "fp16")
    }
    assert all(row["registers"] and not row["spills"] for row in rows)
    assert done.stderr.endswith("6 configurations: none spills a register or exceeds its device\n")
    table = here("kernels", "resources", "silu", "--target", "gfx942").stdout.splitlines()
    assert [line.split()[:4] for line in table[1:]] == [
        ["gfx942", dtype, "silu", "1"] for dtype in ("fp32", "bf16", "fp16")
    ]


def test_a_form_that_spills_is_exit_code_1(compiler, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from orchestrator.cli.main import app
    from workers.kernels.compilation import triton_table

    spills = triton_table.Config("rmsnorm_rows", (1, 65536), 16)
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path))
    monkeypatch.setattr(triton_table, "configs", lambda on, itemsize, triton: [spills] if itemsize == 4 else [])
    done = CliRunner().invoke(app, ["kernels", "resources", "--target", "sm_90"])
    assert done.exit_code == 1
    assert "sm_90   fp32   rmsnorm_rows 1x65536, 16 warps, 1 stages" in done.output
    assert "1 of 1 configurations may not be launched" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--target", "sm_91"], "unknown target 'sm_91'; did you mean 'sm_90'?"),
        (["sylu"], "unknown kernel 'sylu'; did you mean 'silu'?"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_nearest(here, compiler, arguments, told):
    done = here("kernels", "resources", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert " ".join(done.stderr.split()).replace(" did", "; did", 1).startswith(f"error: {told}")
