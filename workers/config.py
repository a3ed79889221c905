"""What a user may set once for all their code: arguments over environment over file, checked by name and value.

    PolyfleetConfig(nvidia={"allow_tf32": True})               an argument
    POLYFLEET_CONFIG__NVIDIA__ALLOW_TF32=true                  the environment
    ~/.config/polyfleet/config.toml, or POLYFLEET_CONFIG_FILE  [nvidia] allow_tf32 = true

Every option takes effect where workers/backends/<vendor>.py says `self.config.<option>`; there is none that does not.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from cluster import catalogue
from cluster.catalogue.precision import long_name
from cluster.errors import SpecError, UserError, nearest

Fraction = Annotated[float, Field(gt=0, le=1)]
Precision = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "flash", "efficient", "math"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# In the environment a list is written as people write PATH-like things: nvidia,cpu
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(lambda v: split(v) if isinstance(v, str) else v)]


def split(text: str) -> tuple[str, ...]:
    """`nvidia, cpu` as a tuple."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


class VendorConfig(BaseModel):
    """Options that every back end has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = Field(default="float32", description="what to compute in where the caller says nothing")
    compile_mode: CompileMode = Field(default="default", description="mode of torch.compile at levels O2 and O3")

    @field_validator("precision", mode="before")
    @classmethod
    def _long_name(cls, value: object) -> object:
        return long_name(value) if isinstance(value, str) else value


class CPUConfig(VendorConfig):
    threads: Annotated[int, Field(gt=0)] | None = Field(default=None, description="threads of one operator (intra-op)")
    engine: Literal["torch", "ipex"] | None = Field(
        default=None, description="operators: torch's, or Intel's extension"
    )
    float32_matmul: Literal["highest", "high", "medium"] | None = Field(
        default=None, description="torch.set_float32_matmul_precision"
    )
    attention: Attention = Field(default="auto", description="the kernel of scaled_dot_product_attention")


class GPUConfig(VendorConfig):
    """Options that CUDA and ROCm builds of torch share."""

    allow_tf32: bool | None = Field(default=None, description="TF32 units for float32 products and convolutions")
    attention: Attention = Field(default="auto", description="the kernel of scaled_dot_product_attention")
    memory_fraction: Fraction | None = Field(default=None, description="most of the memory this process may take")
    memory_growth: bool | None = Field(default=None, description="expandable segments: grow allocations in place")
    fp8: bool = Field(default=False, description="let level O3 compute linear layers in float8")


class NVIDIAConfig(GPUConfig):
    pass


class AMDConfig(GPUConfig):
    pass


class TPUConfig(VendorConfig):
    topology: Annotated[str, Field(pattern=r"^\d+,\d+,\d+$")] | None = Field(
        default=None, description="chips of this process in x,y,z (TPU_CHIPS_PER_PROCESS_BOUNDS)"
    )
    persistent_cache: Path | None = Field(default=None, description="folder of programs XLA has compiled")
    matmul_precision: Literal["default", "high", "highest"] | None = Field(
        default=None, description="passes of the matrix units for float32 products"
    )


class IntelConfig(VendorConfig):
    memory_fraction: Fraction | None = Field(default=None, description="most of the memory this process may take")


class NeuronConfig(VendorConfig):
    persistent_cache: Path | None = Field(default=None, description="folder of programs neuronx-cc compiled")


class AppleConfig(VendorConfig):
    memory_fraction: Fraction | None = Field(default=None, description="most of the memory this process may take")


class LibrariesConfig(BaseModel):
    """Execution libraries below a device, by the names of `polyfleet backends --libraries`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: tuple[str, ...] | None = Field(default=None, description="these alone; None is all that are there")
    disabled: tuple[str, ...] = Field(default=(), description="not these")

    @field_validator("enabled")
    @classmethod
    def _at_least_one(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("no library is enabled; leave it out to have all, or name at least one")
        return value


class PolyfleetConfig(BaseSettings):
    """Raises SpecError naming the field and the nearest valid value."""

    model_config = SettingsConfigDict(
        env_prefix="POLYFLEET_CONFIG__", env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    backends: Names = Field(
        default_factory=lambda: tuple(catalogue.vendors()), description="back ends that may be chosen; at least one"
    )
    priority: Names = Field(default=(), description="back ends or kinds to choose first, best first")
    cpu: CPUConfig = Field(default_factory=CPUConfig)
    nvidia: NVIDIAConfig = Field(default_factory=NVIDIAConfig)
    amd: AMDConfig = Field(default_factory=AMDConfig)
    tpu: TPUConfig = Field(default_factory=TPUConfig)
    intel: IntelConfig = Field(default_factory=IntelConfig)
    neuron: NeuronConfig = Field(default_factory=NeuronConfig)
    apple: AppleConfig = Field(default_factory=AppleConfig)
    libraries: LibrariesConfig = Field(default_factory=LibrariesConfig)

    def __init__(self, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as e:
            raise _explained(e) from None

    @field_validator("backends")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"no back end is enabled; name at least one of {', '.join(catalogue.vendors())}")
        try:
            return tuple(catalogue.backend_name(name) for name in value)
        except UserError as e:
            raise ValueError(str(e)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _File(settings_cls)


def section(config: "PolyfleetConfig | VendorConfig | None", backend: str) -> VendorConfig:
    """The options of one back end; a back end from outside the package has the common ones. Raises UserError."""
    if isinstance(config, VendorConfig):
        return config
    if config is not None and not isinstance(config, PolyfleetConfig):
        raise UserError(f"config is a {type(config).__name__}", "give a workers.PolyfleetConfig")
    found: VendorConfig = getattr(config or PolyfleetConfig(), backend, VendorConfig())
    return found


def libraries_of(config: "PolyfleetConfig | VendorConfig | None") -> LibrariesConfig:
    """A vendor's section alone switches no library."""
    return LibrariesConfig() if isinstance(config, VendorConfig) else (config or PolyfleetConfig()).libraries


def file() -> Path:
    """The configuration file, which need not exist unless POLYFLEET_CONFIG_FILE names it."""
    named = os.environ.get("POLYFLEET_CONFIG_FILE")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(named) if named else folder / "polyfleet" / "config.toml"


class _File(InitSettingsSource):
    """The configuration file as the source of least weight."""

    def __init__(self, settings_cls: type[BaseSettings]):
        super().__init__(settings_cls, init_kwargs=_read_file())


def _read_file() -> dict[str, Any]:
    try:
        return tomllib.loads(file().read_text())
    except FileNotFoundError:
        if "POLYFLEET_CONFIG_FILE" in os.environ:
            raise UserError(f"there is no file {file()}", "POLYFLEET_CONFIG_FILE names it: write or unset it") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{file()} cannot be read as TOML: {e}", "see docs/backends for its options") from None


def _explained(error: ValidationError) -> SpecError:
    """The first mistake; an unknown key with the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] != "extra_forbidden":
        return SpecError(".".join(path), f"{first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})")
    fields: Any = PolyfleetConfig.model_fields
    for part in path[:-1]:
        fields = fields[part].annotation.model_fields
    return SpecError(".".join(path), f"unknown option {path[-1]!r}", nearest(path[-1], list(fields)))
