"""Where options come from, and that wrong ones are named. What each does: tests/workers/backends/test_options.py."""

import subprocess
import sys

import pytest

from cluster.errors import SpecError, UserError
from workers.config import PolyfleetConfig


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
        ({"cpu": {"threads": 0}}, "cpu.threads: Input should be greater than 0 (given: 0)"),
        ({"cpu": {"precision": "int8"}}, "cpu.precision: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"nvidia": {"memory_fraction": 1.5}}, "nvidia.memory_fraction: Input should be less than or equal to 1"),
        ({"tpu": {"topology": "2x2"}}, "tpu.topology: String should match pattern"),
        ({"libraries": {"enabled": []}}, "libraries.enabled: no library is enabled"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(given, said):
    with pytest.raises(SpecError) as caught:
        PolyfleetConfig(**given)
    assert str(caught.value).startswith(said)


def test_a_file_that_is_named_but_absent_or_broken_is_no_silent_default(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFLEET_CONFIG_FILE", str(tmp_path / "mine.toml"))
    with pytest.raises(UserError, match=r"there is no file .*mine\.toml"):
        PolyfleetConfig()
    (tmp_path / "mine.toml").write_text("cpu = [")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        PolyfleetConfig()


def test_reading_the_configuration_imports_no_torch():
    told = "import sys, workers.config as c; c.PolyfleetConfig(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
