import pytest

from cluster.errors import SpecError
from orchestrator.cli.jobs.job_arguments import DEVICE_FIELDS, SubmitArguments, build_specs
from orchestrator.spec.job_spec_parts import ResourceSpec
from tests.spec_fields import OF_JOB

REQUIREMENTS = {name: value for name, value in OF_JOB.items() if name in ResourceSpec.model_fields}


@pytest.fixture
def resources_of(tmp_path):
    """Return the resources of a job file that has `written`, submitted with some options."""

    def resources(written, **options):
        path = tmp_path / "job.yaml"
        path.write_text(f"command: 'true'\nresources: {written}\n")
        [spec] = build_specs(SubmitArguments([str(path)], **options))
        return spec.resources.model_dump(mode="json", exclude_defaults=True)

    return resources


@pytest.mark.parametrize("field", sorted(REQUIREMENTS.keys() - DEVICE_FIELDS))
def test_accelerators_of_the_command_line_keep_every_other_requirement_of_the_file(resources_of, field):
    written = resources_of({"accelerators": "nvidia", field: REQUIREMENTS[field]})
    assert resources_of({"accelerators": "nvidia", field: REQUIREMENTS[field]}, accelerators="cpu") == (
        written | {"accelerators": "cpu"}
    )


@pytest.mark.parametrize(
    "devices", [{"accelerators": "nvidia:H100:8"}, {"count": 8}, {"any_of": [{"pool": "a"}]}, {"exclusive": True}]
)
def test_accelerators_of_the_command_line_replace_the_devices_of_the_file(resources_of, devices):
    assert resources_of({"accelerators": "nvidia", **devices}, accelerators="cpu:2") == {"accelerators": "cpu:2"}


@pytest.mark.parametrize("pools", [{"pool": "a"}, {"pools": ["a", "b"]}])
def test_a_pool_of_the_command_line_replaces_the_pools_of_the_job_and_of_its_candidates(resources_of, pools):
    assert resources_of(pools, pool="c") == {"pool": "c"}
    assert resources_of(pools, pool="c", accelerators="cpu") == {"accelerators": "cpu", "pool": "c"}
    candidates = [{"accelerators": "cpu", **pools}, {"accelerators": "tpu"}]
    assert resources_of({"ordered": candidates}, pool="c") == {
        "pool": "c",
        "ordered": [{"accelerators": "cpu"}, {"accelerators": "tpu"}],
    }


@pytest.mark.parametrize("deadline", ["2020-01-01T00:00:00Z", "2020-01-01T02:00:00+02:00"])
def test_a_deadline_that_is_past_is_refused_before_a_server_is_asked_or_started(tmp_path, deadline):
    (tmp_path / "job.yaml").write_text(f'command: "true"\ndeadline: "{deadline}"\n')
    with pytest.raises(SpecError, match=r"deadline: .* is in the past; it is 2"):
        build_specs(SubmitArguments([str(tmp_path / "job.yaml")]))
    (tmp_path / "job.yaml").write_text('command: "true"\ndeadline: 6h\n')
    assert build_specs(SubmitArguments([str(tmp_path / "job.yaml")]))[0].deadline == "6h"
