"""Where options come from, and that wrong ones are named. devices/backends/test_options.py tests what each does."""

import subprocess
import sys

import pytest

from cluster.errors import SpecError, UserError
from workers.options.config import PolyfleetConfig


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def write(tmp_path, text):
    (tmp_path / "polyfleet").mkdir()
    (tmp_path / "polyfleet" / "config.toml").write_text(text)


def test_arguments_win_over_environment_and_that_over_the_file(tmp_path, monkeypatch):
    write(tmp_path, 'backends = ["cuda", "cpu"]\n[nvidia]\nallow_tf32 = true\nprecision = "bf16"\n[cpu]\nthreads = 2\n')
    monkeypatch.setenv("POLYFLEET_CONFIG__NVIDIA__PRECISION", "fp16")
    monkeypatch.setenv("POLYFLEET_CONFIG__PRIORITY", "tpu, nvidia")
    config = PolyfleetConfig(cpu={"threads": 1})
    assert config.backends == ("nvidia", "cpu")
    assert (config.nvidia.allow_tf32, config.nvidia.precision) == (True, "float16")
    assert config.cpu.threads == 1
    assert config.priority == ("tpu", "nvidia")
    assert PolyfleetConfig().cpu.threads == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nvida": {}}, "nvida: unknown option 'nvida'; did you mean 'nvidia'?"),
        ({"nvidia": {"alow_tf32": 1}}, "nvidia.alow_tf32: unknown option 'alow_tf32'; did you mean 'allow_tf32'?"),
        ({"backends": []}, "backends: no back end is enabled; name at least one of nvidia"),
        ({"backends": ["cudaa"]}, "backends: unknown backend 'cudaa'; did you mean 'cuda'?"),
        ({"cpu": {"threads": 0}}, "cpu.threads: Input should be greater than 0 (got 0)"),
        ({"cpu": {"precision": "int8"}}, "cpu.precision: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"nvidia": {"memory_fraction": 1.5}}, "nvidia.memory_fraction: Input should be less than or equal to 1"),
        ({"tpu": {"topology": "2x2"}}, "tpu.topology: String should match pattern"),
        ({"libraries": {"enabled": []}}, "libraries.enabled: no library is enabled"),
        ({"libraries": {"enabled": ["mkldn"]}}, "libraries.enabled: unknown library 'mkldn'; did you mean 'mkldnn'?"),
        (
            {"libraries": {"disabled": ["onednm"]}},
            "libraries.disabled: unknown library 'onednm'; did you mean 'onednn'?",
        ),
        ({"priority": ["nvidai"]}, "priority: unknown backend 'nvidai'; did you mean 'nvidia'?"),
        ({"priority": ["nvidai:H100-80GB"]}, "priority: unknown backend 'nvidai:H100-80GB'; did you mean 'nvidia'?"),
        ({"cpu": {"attention": "efficient"}}, "cpu.attention: Input should be 'auto', 'measured', 'flash' or 'math'"),
        (
            {"cpu": {"attention": "flsh"}},
            "cpu.attention: Input should be 'auto', 'measured', 'flash' or 'math' (got 'flsh'); did",
        ),
        ({"cpu": {"threads": True}}, "cpu.threads: a number is needed (got True)"),
        ({"cpu": {"threads": 10**9}}, "cpu.threads: Input should be less than or equal to 4096"),
        ({"amd": {"memory_fraction": True}}, "amd.memory_fraction: a number is needed (got True)"),
        ({"tpu": {"persistent_cache": ""}}, "tpu.persistent_cache: name a folder, or omit the option (got '')"),
        ({"tpu": {"compile_mode": "max-autotune"}}, "tpu.compile_mode: unknown option 'compile_mode'"),
        ({"neuron": {"compile_mode": "max-autotune"}}, "neuron.compile_mode: unknown option 'compile_mode'"),
        (
            {"cpu": {"engine": "ipex", "compile_mode": "max-autotune"}},
            "cpu.engine: IPEX does not use torch.compile, so compile_mode has no effect with it: remove one of them",
        ),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(given, said):
    with pytest.raises(SpecError) as caught:
        PolyfleetConfig(**given)
    assert str(caught.value).startswith(said)


def test_names_of_libraries_and_devices_are_kept_as_they_are_called_here():
    config = PolyfleetConfig(libraries={"disabled": ["oneDNN"]}, priority=["CUDA:H100-80GB", "cpu"])
    assert config.libraries.disabled == ("mkldnn",)
    assert config.priority == ("nvidia:H100-80GB", "cpu")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CPUU__THREADS", "4", "unknown option 'CPUU'; did you mean 'CPU'?"),
        ("CPU__THREADSS", "4", "unknown option 'THREADSS'; did you mean 'THREADS'?"),
        ("TPU__COMPILE_MODE", "max-autotune", "unknown option 'COMPILE_MODE'"),
        ("PRIORITIES", "nvidia", "unknown option 'PRIORITIES'; did you mean 'PRIORITY'?"),
        ("CPU__THREADS__COUNT", "4", "an option has no options of its own; remove 'COUNT'"),
        ("CPU", "threads=4", "a section must be a JSON object (got 'threads=4')"),
        ("LIBRARIES", "[]", "a section must be a JSON object (got '[]')"),
    ],
)
def test_a_variable_that_names_no_option_is_refused_by_its_own_name(monkeypatch, variable, value, said):
    monkeypatch.setenv(f"POLYFLEET_CONFIG__{variable}", value)
    with pytest.raises(SpecError) as caught:
        PolyfleetConfig()
    assert str(caught.value).startswith(f"POLYFLEET_CONFIG__{variable}: {said}")
    assert caught.value.field == f"POLYFLEET_CONFIG__{variable}"


def test_a_variable_with_one_underscore_too_few_is_refused_with_what_to_write(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CONFIG_CPU__THREADS", "4")
    with pytest.raises(SpecError, match="write POLYFLEET_CONFIG__CPU__THREADS, or POLYFLEET_CONFIG_FILE"):
        PolyfleetConfig()


def test_lists_in_variables_are_written_with_commas_or_as_json_and_sections_as_json(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CONFIG__BACKENDS", '["cuda", "cpu"]')
    monkeypatch.setenv("POLYFLEET_CONFIG__LIBRARIES__DISABLED", "mha, nnpack")
    monkeypatch.setenv("POLYFLEET_CONFIG__CPU", '{"threads": 4, "engine": "torch"}')
    monkeypatch.setenv("polyfleet_config__cpu__threads", "2")
    config = PolyfleetConfig()
    assert config.backends == ("nvidia", "cpu")
    assert config.libraries.disabled == ("mha", "nnpack")
    assert (config.cpu.threads, config.cpu.engine) == (2, "torch")


def test_a_wrong_value_in_a_variable_is_an_error_of_its_field(monkeypatch):
    monkeypatch.setenv("POLYFLEET_CONFIG__BACKENDS", '["cuda"')
    with pytest.raises(SpecError, match=r"^backends: "):
        PolyfleetConfig()
    monkeypatch.delenv("POLYFLEET_CONFIG__BACKENDS")
    monkeypatch.setenv("POLYFLEET_CONFIG__CPU__THREADS", "four")
    with pytest.raises(SpecError, match=r"^cpu\.threads: .*'four'"):
        PolyfleetConfig()


def test_a_file_that_is_named_but_absent_or_broken_is_no_silent_default(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_CONFIG_FILE", str(tmp_path / "mine.toml"))
    with pytest.raises(UserError, match=r"there is no file .*mine\.toml"):
        PolyfleetConfig()
    (tmp_path / "mine.toml").write_text("cpu = [")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        PolyfleetConfig()


def test_reading_the_configuration_imports_no_torch():
    told = "import sys, workers.options.config as c; c.PolyfleetConfig(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
