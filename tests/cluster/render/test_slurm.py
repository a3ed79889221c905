"""The batch script: what Slurm reads of it, that bash takes it, and that nobody's text breaks out of it."""

import shlex
import shutil
import subprocess

import pytest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet
from cluster.render import slurm

POOL = {"backend": "cpu", "environment": {"interpreter": "/shared/env/bin/python"}, "cpus": 8}
GPU = POOL | {"backend": "nvidia", "accelerators": "H100-80GB:8", "memory": "1800GB", "min_nodes": 2, "max_nodes": 4}


def script(pools: dict, **more: object) -> str:
    fleet = parse_fleet({"name": "lab", "pools": pools, "slurm": {"folder": "/shared/me", **more}})
    text, _ = slurm.render(fleet)
    assert slurm.render(fleet)[0] == text, "the same file twice"
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    return text


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_one_pool_is_a_plain_job_whose_options_are_sbatchs():
    own = {"slurm": {"partition": "gpu", "constraint": "hopper&nvlink", "gres": "gpu:h100:8"}}
    assert directives(script({"h100": GPU | own}, time="2-00:00:00", account="lab", qos="high")) == [
        "--job-name=polyfleet-lab",
        "--dependency=singleton",
        "--output=/shared/me/slurm-%j.log",
        "--signal=B:TERM@90",
        "--time=2-00:00:00",
        "--account=lab",
        "--qos=high",
        "--partition=gpu",
        "--constraint=hopper&nvlink",
        "--nodes=2-4",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--mem=1716613M",
        "--gres=gpu:h100:8",
    ]


def test_several_pools_are_the_components_of_a_heterogeneous_job():
    text = script({"h100": GPU, "cpu": POOL | {"nodes": 3}})
    options = directives(text)
    first, second = options[: options.index("hetjob")], options[options.index("hetjob") + 1 :]
    assert "--gres=gpu:8" in first and "--nodes=2-4" in first
    assert second == ["--job-name=polyfleet-lab-cpu", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=8"]
    assert "srun --het-group=0 --ntasks-per-node=1" in text and "srun --het-group=1 --ntasks-per-node=1" in text
    assert "everywhere=('--het-group=0,1' " in text


def test_a_node_is_told_its_pool_its_resources_and_where_the_others_keep_their_checkpoints():
    text = script({"trn": POOL | {"backend": "neuron", "accelerators": "trn1:32", "slurm": {"gres": "neuron:16"}},
                   "cpu": POOL})  # fmt: skip
    (line,) = [part for part in text.replace("\\\n", "").splitlines() if part.startswith("srun --het-group=0")]
    words = shlex.split(line)
    assert "POLYFLEET_POOL=trn" in words and "POLYFLEET_STORAGE=/shared/me/storage/trn" in words
    assert 'POLYFLEET_LOCAL_POOLS={"cpu": "/shared/me/storage/cpu"}' in words
    assert '--resources={"neuron_cores": 32}' in words and "--num-gpus=0" in words and "--num-cpus=8" in words
    labels = next(word for word in words if word.startswith("POLYFLEET_LABELS="))
    assert labels.startswith("POLYFLEET_LABELS=polyfleet.io/pool=trn,polyfleet.io/backend=neuron,")


def test_the_token_is_made_by_the_script_for_its_user_alone_and_stands_in_no_command_line():
    text = script({"cpu": POOL})
    assert text.index("umask 077") < text.index("/dev/urandom")
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token" in text
    assert "--include-dashboard=false" in text and "0.0.0.0" not in text


def test_what_a_user_writes_into_a_variable_reaches_the_node_as_it_is(tmp_path):
    nasty = "'; touch broken; echo \"$(id)\" `id` \\ 'x"
    text = script({"cpu": POOL | {"env": {"NASTY": nasty}}})
    start = text[text.index("srun --ntasks-per-node=1") :].partition("bash -c")[0].removesuffix("\\\n  ")
    told = start[start.index(" env ") :].rstrip(" \\\n")
    done = subprocess.run(["bash", "-c", f"{told} printenv NASTY"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode() == nasty + "\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "more, field",
    [
        ({"folder": "/shared/a b"}, "slurm.folder"),
        ({"folder": "/shared/$(id)"}, "slurm.folder"),
        ({"folder": "relative"}, "slurm.folder"),
        ({"account": "a\n#SBATCH --uid=0"}, "slurm.account"),
        ({"qos": "x y"}, "slurm.qos"),
        ({"time": "soon"}, "slurm.time"),
    ],
)
def test_what_would_break_a_directive_is_refused_naming_the_field(more: dict, field: str):
    with pytest.raises(SpecError) as told:
        script({"cpu": POOL}, **more)
    assert told.value.field == field


@pytest.mark.parametrize(
    "pool, field",
    [
        (POOL | {"cpus": None}, "pools.p.cpus"),
        (POOL | {"environment": "main"}, "pools.p.environment"),
        (POOL | {"backend": "neuron", "accelerators": "trn1:32"}, "pools.p.slurm.gres"),
        (POOL | {"slurm": {"partition": "a b"}}, "pools.p.slurm.partition"),
    ],
)
def test_what_a_pool_lacks_for_slurm_is_named(pool: dict, field: str):
    with pytest.raises(SpecError) as told:
        script({"p": pool})
    assert told.value.field == field


def test_a_fleet_without_a_shared_folder_is_told_to_name_one():
    with pytest.raises(SpecError, match=r"slurm: is required .* name a folder that all nodes see"):
        slurm.render(parse_fleet({"pools": {"cpu": POOL}}))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    text = script({"h100": GPU, "cpu": POOL})
    done = subprocess.run(["shellcheck", "-S", "warning", "-"], input=text.encode(), capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_a_pool_whose_storage_is_an_object_store_saves_in_a_folder_and_uploads():
    text = script({"cpu": POOL | {"storage": "s3://bucket/runs"}})
    words = shlex.split(next(part for part in text.replace("\\\n", "").splitlines() if part.startswith("srun ")))
    assert "POLYFLEET_OBJECT_STORE=s3://bucket/runs" in words and "POLYFLEET_STORAGE=/shared/me/storage/cpu" in words
