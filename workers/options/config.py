"""Configuration of back ends, from arguments, environment and file, in this order of priority.

    PolyfleetConfig(nvidia={"allow_tf32": True})               an argument
    POLYFLEET_CONFIG__NVIDIA__ALLOW_TF32=true                  the environment
    ~/.config/polyfleet/config.toml, or POLYFLEET_CONFIG_FILE  [nvidia] allow_tf32 = true

Every option is read as `self.config.<option>` in workers/devices/backends/vendors/<vendor>.py; there are none
without effect.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cluster import catalogue
from cluster.catalogue.precision import long_name
from cluster.errors import SpecError, UserError, nearest
from workers.options.config_sources import ConfigFileSource, EnvironmentSource, section_type
from workers.options.config_values import (
    Attention,
    Backends,
    CompileMode,
    CPUAttention,
    Engine,
    Folder,
    Fraction,
    Kinds,
    Libraries,
    MatmulPrecision,
    Precision,
    Threads,
    Topology,
    XLAPrecision,
    short_repr,
)


class VendorConfig(BaseModel):
    """Options of every back end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = Field(default="float32", description="default precision of computation")

    @field_validator("precision", mode="before")
    @classmethod
    def _long_name(cls, value: object) -> object:
        return long_name(value) if isinstance(value, str) else value


class CompiledConfig(VendorConfig):
    """Options of back ends that use torch's compiler, Inductor; XLA and neuronx-cc have no such modes."""

    compile_mode: CompileMode = Field(default="default", description="mode of torch.compile at levels O2 and O3")


class CPUConfig(CompiledConfig):
    threads: Threads | None = Field(default=None, description="threads of one operator (intra-op)")
    engine: Engine | None = Field(
        default=None, description="implementation of operators: torch's, or Intel's extension"
    )
    float32_matmul: MatmulPrecision | None = Field(default=None, description="torch.set_float32_matmul_precision")
    attention: CPUAttention = Field(
        default="auto", description="kernel of scaled_dot_product_attention (measured: by `polyfleet kernels tune`)"
    )

    @field_validator("engine")
    @classmethod
    def _has_modes(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "ipex" and info.data.get("compile_mode", "default") != "default":
            raise ValueError(
                "IPEX does not use torch.compile, so compile_mode has no effect with it: remove one of them"
            )
        return value


class GPUConfig(CompiledConfig):
    """Options of both CUDA and ROCm builds of torch."""

    allow_tf32: bool | None = Field(default=None, description="use TF32 units for float32 products and convolutions")
    attention: Attention = Field(
        default="auto", description="kernel of scaled_dot_product_attention (measured: by `polyfleet kernels tune`)"
    )
    memory_fraction: Fraction | None = Field(
        default=None, description="maximum fraction of device memory for this process"
    )
    memory_growth: bool | None = Field(default=None, description="expandable segments: grow allocations in place")
    fp8: bool = Field(default=False, description="let level O3 compute linear layers in float8")


class NVIDIAConfig(GPUConfig):
    pass


class AMDConfig(GPUConfig):
    pass


class TPUConfig(VendorConfig):
    topology: Topology | None = Field(
        default=None, description="chips of this process in x,y,z (TPU_CHIPS_PER_PROCESS_BOUNDS)"
    )
    persistent_cache: Folder | None = Field(default=None, description="folder for programs that XLA has compiled")
    matmul_precision: XLAPrecision | None = Field(
        default=None, description="passes of the matrix units for float32 products"
    )


class IntelConfig(CompiledConfig):
    memory_fraction: Fraction | None = Field(
        default=None, description="maximum fraction of device memory for this process"
    )


class NeuronConfig(VendorConfig):
    persistent_cache: Folder | None = Field(
        default=None, description="folder for programs that neuronx-cc has compiled"
    )


class AppleConfig(CompiledConfig):
    memory_fraction: Fraction | None = Field(
        default=None, description="maximum fraction of device memory for this process"
    )


class LibrariesConfig(BaseModel):
    """Execution libraries below a device, by the names of `polyfleet backends --libraries`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: Libraries | None = Field(default=None, description="libraries to use (default: all available)")
    disabled: Libraries = Field(default=(), description="libraries not to use")

    @field_validator("enabled")
    @classmethod
    def _at_least_one(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("no library is enabled; omit the option to use all, or name at least one")
        return value


class PolyfleetConfig(BaseSettings):
    """The configuration. Raises SpecError that names the field and the nearest valid value."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    backends: Backends = Field(
        default_factory=lambda: tuple(catalogue.vendors()),
        description="back ends that may be chosen (default: all)",
    )
    priority: Kinds = Field(default=(), description="back ends or kinds to choose first, best first")
    cpu: CPUConfig = Field(default_factory=CPUConfig)
    nvidia: NVIDIAConfig = Field(default_factory=NVIDIAConfig)
    amd: AMDConfig = Field(default_factory=AMDConfig)
    tpu: TPUConfig = Field(default_factory=TPUConfig)
    intel: IntelConfig = Field(default_factory=IntelConfig)
    neuron: NeuronConfig = Field(default_factory=NeuronConfig)
    apple: AppleConfig = Field(default_factory=AppleConfig)
    libraries: LibrariesConfig = Field(default_factory=LibrariesConfig)

    def __init__(self, **options: Any):
        open_sections()
        try:
            super().__init__(**options)
        except ValidationError as e:
            raise _spec_error(e) from None

    @field_validator("backends")
    @classmethod
    def _any(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"no back end is enabled; name at least one of {', '.join(catalogue.vendors())}")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvironmentSource(settings_cls), ConfigFileSource(settings_cls)


@cache
def open_sections() -> None:
    """Add a section with the common options for each vendor whose backend comes from another distribution.

    Called when a configuration is created, not at import, as it searches the installed distributions.
    """
    fields = PolyfleetConfig.model_fields
    added = {name: row.title for name, row in catalogue.vendors().items() if name not in fields}
    for name, title in added.items():
        fields[name] = FieldInfo(annotation=CompiledConfig, default_factory=CompiledConfig, description=title)
    if added:
        PolyfleetConfig.model_rebuild(force=True)


_REMEDY = "pass a workers.PolyfleetConfig, or a dict of its options"
ConfigLike = PolyfleetConfig | Mapping[str, Any] | None


def config_of(config: ConfigLike) -> PolyfleetConfig:
    """Return a configuration from a PolyfleetConfig, a dict of options, or None (environment and file).

    Raises UserError for anything else, SpecError for an invalid option.
    """
    if isinstance(config, PolyfleetConfig):
        return config
    if config is None:
        return PolyfleetConfig()
    if not isinstance(config, Mapping):
        raise UserError(f"config is a {type(config).__name__}", _REMEDY)
    if invalid_names := [name for name in config if not isinstance(name, str)]:
        hint = nearest("", list(PolyfleetConfig.model_fields))
        raise SpecError("config", f"unknown option {short_repr(invalid_names[0])}", hint)
    return PolyfleetConfig(**config)


def section_of(config: "ConfigLike | VendorConfig", backend: str) -> VendorConfig:
    """Return the options of one back end; a back end of another distribution has only the common ones.

    Raises UserError for options of another back end.
    """
    if not isinstance(config, VendorConfig):
        options: VendorConfig = getattr(config_of(config), backend, None) or CompiledConfig()
        return options
    field = PolyfleetConfig.model_fields.get(backend)
    own_type = section_type(field) if field else CompiledConfig
    if not isinstance(config, own_type or VendorConfig):
        raise UserError(f"config is a {type(config).__name__}, but the back end is {backend}", _REMEDY)
    return config


def compile_mode_of(config: VendorConfig) -> str:
    """Mode of torch.compile; "default" for back ends with another compiler."""
    return config.compile_mode if isinstance(config, CompiledConfig) else "default"


def enabled_backends(config: "ConfigLike | VendorConfig") -> tuple[str, ...]:
    """Return the back ends that may be chosen."""
    return config_of(None if isinstance(config, VendorConfig) else config).backends


def libraries_of(config: "ConfigLike | VendorConfig") -> LibrariesConfig:
    """Return the options of libraries; the defaults for a vendor's section, which has none."""
    return LibrariesConfig() if isinstance(config, VendorConfig) else config_of(config).libraries


def _spec_error(error: ValidationError) -> SpecError:
    """Convert the first error into a SpecError; for an unknown key or value, with the nearest valid one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        options: Any = PolyfleetConfig
        for part in path[:-1]:
            options = section_type(options.model_fields[part])
        return SpecError(".".join(path), f"unknown option {path[-1]!r}", nearest(path[-1], list(options.model_fields)))
    message = f"{first['msg'].removeprefix('Value error, ')} (got {short_repr(first['input'])})"
    choices = re.findall(r"'([^']*)'", first["msg"]) if first["type"] == "literal_error" else []
    matches = get_close_matches(str(first["input"]), choices, n=1, cutoff=0.5)
    return SpecError(".".join(path), message, f"did you mean {matches[0]!r}?" if matches else "")
