"""`polyfleet render` as a user calls it, and `polyfleet up` of a file that can only be rendered."""

import pytest

from cluster.input import strict_yaml

FLEET = """
name: lab
pools:
  h100:
    backend: nvidia
    accelerators: H100:8
    cpus: 96
    memory: 1800GB
    image: registry.example/polyfleet:1
    environment: {interpreter: /shared/env/bin/python}
    ray_autoscaler: {node_config: {InstanceType: p5.48xlarge}}
kubernetes: {head: {image: registry.example/polyfleet:1}}
ray_autoscaler:
  provider: {type: aws, region: us-west-2}
  head: {node_config: {InstanceType: m7i.xlarge}}
  head_image: registry.example/polyfleet:1
slurm: {folder: /shared/me}
"""


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


@pytest.mark.parametrize("engine, first", [("kuberay", "# Fleet lab"), ("ray-autoscaler", "# Fleet"), ("slurm", "#!/")])
def test_a_file_comes_on_stdout_or_where_it_is_wanted_and_notes_on_stderr(polyfleet, fleet, tmp_path, engine, first):
    printed = polyfleet("render", engine, "--file", str(fleet))
    assert (printed.returncode, printed.stdout.startswith(first)) == (0, True), printed.stderr
    written = polyfleet("render", engine, "--file", str(fleet), "-o", "out")
    assert (written.returncode, written.stdout) == (0, "")
    assert (tmp_path / "out").read_text() == printed.stdout
    assert all(line.startswith("note: ") for line in printed.stderr.splitlines())


def test_what_only_another_engine_needs_is_not_asked_for(polyfleet, fleet):
    without = {**strict_yaml.load(FLEET, "fleet"), "ray_autoscaler": None, "slurm": None}
    fleet.write_text(strict_yaml.dump({key: value for key, value in without.items() if value is not None}))
    assert polyfleet("render", "kuberay", "--file", str(fleet)).returncode == 0
    refused = polyfleet("render", "slurm", "--file", str(fleet))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: slurm: is required to render a batch script\n  name a folder")


def test_up_refuses_a_pool_that_can_only_be_rendered_and_starts_nothing(polyfleet, fleet, tmp_path):
    done = polyfleet("up", "--file", str(fleet), env={"POLYFLEET_HOME": str(tmp_path / "home")})
    assert done.returncode == 2
    assert "pools.h100.accelerators: `polyfleet up` starts nodes on this machine and cannot apply" in done.stderr
    assert "polyfleet render kuberay" in done.stderr
    assert not (tmp_path / "home" / "fleet.json").exists()


def test_a_place_that_cannot_be_written_is_told(polyfleet, fleet):
    done = polyfleet("render", "slurm", "--file", str(fleet), "-o", "no/such/folder/job.sh")
    assert (done.returncode, "cannot write no/such/folder/job.sh" in done.stderr) == (2, True)
