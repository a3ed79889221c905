"""What a user may set once for all their code: arguments over environment over file, checked by name and value.

    PolyfleetConfig(nvidia={"allow_tf32": True})               an argument
    POLYFLEET_CONFIG__NVIDIA__ALLOW_TF32=true                  the environment
    ~/.config/polyfleet/config.toml, or POLYFLEET_CONFIG_FILE  [nvidia] allow_tf32 = true

Every option takes effect where workers/backends/<vendor>.py says `self.config.<option>`; there is none that does not.
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
from workers.config_sources import ConfigFileSource, EnvironmentSource, section_type
from workers.config_values import (
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
    """Options that every back end has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Precision = Field(default="float32", description="what to compute in where the caller says nothing")

    @field_validator("precision", mode="before")
    @classmethod
    def _long_name(cls, value: object) -> object:
        return long_name(value) if isinstance(value, str) else value


class CompiledConfig(VendorConfig):
    """Of those whose compiler is torch's own, Inductor; XLA and neuronx-cc have no such modes."""

    compile_mode: CompileMode = Field(default="default", description="mode of torch.compile at levels O2 and O3")


class CPUConfig(CompiledConfig):
    threads: Threads | None = Field(default=None, description="threads of one operator (intra-op)")
    engine: Engine | None = Field(default=None, description="operators: torch's, or Intel's extension")
    float32_matmul: MatmulPrecision | None = Field(default=None, description="torch.set_float32_matmul_precision")
    attention: CPUAttention = Field(default="auto", description="the kernel of scaled_dot_product_attention")

    @field_validator("engine")
    @classmethod
    def _has_modes(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "ipex" and info.data.get("compile_mode", "default") != "default":
            raise ValueError("IPEX does not use torch.compile, so compile_mode has no effect with it: leave one out")
        return value


class GPUConfig(CompiledConfig):
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
    topology: Topology | None = Field(
        default=None, description="chips of this process in x,y,z (TPU_CHIPS_PER_PROCESS_BOUNDS)"
    )
    persistent_cache: Folder | None = Field(default=None, description="folder of programs XLA has compiled")
    matmul_precision: XLAPrecision | None = Field(
        default=None, description="passes of the matrix units for float32 products"
    )


class IntelConfig(CompiledConfig):
    memory_fraction: Fraction | None = Field(default=None, description="most of the memory this process may take")


class NeuronConfig(VendorConfig):
    persistent_cache: Folder | None = Field(default=None, description="folder of programs neuronx-cc compiled")


class AppleConfig(CompiledConfig):
    memory_fraction: Fraction | None = Field(default=None, description="most of the memory this process may take")


class LibrariesConfig(BaseModel):
    """Execution libraries below a device, by the names of `polyfleet backends --libraries`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: Libraries | None = Field(default=None, description="these alone; None is all that are there")
    disabled: Libraries = Field(default=(), description="not these")

    @field_validator("enabled")
    @classmethod
    def _at_least_one(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("no library is enabled; leave it out to have all, or name at least one")
        return value


class PolyfleetConfig(BaseSettings):
    """Raises SpecError naming the field and the nearest valid value."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    backends: Backends = Field(
        default_factory=lambda: tuple(catalogue.vendors()),
        description="back ends that may be chosen; all unless some are named",
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

    def __init__(self, **given: Any):
        open_sections()
        try:
            super().__init__(**given)
        except ValidationError as e:
            raise _explained(e) from None

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
    """A section with the common options for each vendor of another distribution, beside those that are written above.

    When a configuration is made, not at import: the distributions are looked for then.
    """
    fields = PolyfleetConfig.model_fields
    added = {name: row.title for name, row in catalogue.vendors().items() if name not in fields}
    for name, title in added.items():
        fields[name] = FieldInfo(annotation=CompiledConfig, default_factory=CompiledConfig, description=title)
    if added:
        PolyfleetConfig.model_rebuild(force=True)


_REMEDY = "give a workers.PolyfleetConfig, or a dict of its options"
Given = PolyfleetConfig | Mapping[str, Any] | None


def config_of(given: Given) -> PolyfleetConfig:
    """What was given as a configuration: a PolyfleetConfig, a dict of its options, or None for what is set outside.

    Raises UserError for anything else, SpecError for an option that is wrong.
    """
    if isinstance(given, PolyfleetConfig):
        return given
    if given is None:
        return PolyfleetConfig()
    if not isinstance(given, Mapping):
        raise UserError(f"config is a {type(given).__name__}", _REMEDY)
    if strange := [name for name in given if not isinstance(name, str)]:
        known = nearest("", list(PolyfleetConfig.model_fields))
        raise SpecError("config", f"unknown option {short_repr(strange[0])}", known)
    return PolyfleetConfig(**given)


def section(config: "Given | VendorConfig", backend: str) -> VendorConfig:
    """The options of one back end; a back end from outside the package has the common ones. Raises UserError."""
    if not isinstance(config, VendorConfig):
        found: VendorConfig = getattr(config_of(config), backend, None) or CompiledConfig()
        return found
    field = PolyfleetConfig.model_fields.get(backend)
    own = section_type(field) if field else CompiledConfig
    if not isinstance(config, own or VendorConfig):
        raise UserError(f"config is a {type(config).__name__}, and the back end is {backend}", _REMEDY)
    return config


def compile_mode_of(config: VendorConfig) -> str:
    """torch.compile's mode; its default for those whose compiler has none."""
    return config.compile_mode if isinstance(config, CompiledConfig) else "default"


def enabled(config: "Given | VendorConfig") -> tuple[str, ...]:
    """Back ends that may be chosen."""
    return config_of(None if isinstance(config, VendorConfig) else config).backends


def libraries_of(config: "Given | VendorConfig") -> LibrariesConfig:
    """A vendor's section alone switches no library."""
    return LibrariesConfig() if isinstance(config, VendorConfig) else config_of(config).libraries


def _explained(error: ValidationError) -> SpecError:
    """The first mistake; an unknown key or word with the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        options: Any = PolyfleetConfig
        for part in path[:-1]:
            options = section_type(options.model_fields[part])
        return SpecError(".".join(path), f"unknown option {path[-1]!r}", nearest(path[-1], list(options.model_fields)))
    said = f"{first['msg'].removeprefix('Value error, ')} (given: {short_repr(first['input'])})"
    words = re.findall(r"'([^']*)'", first["msg"]) if first["type"] == "literal_error" else []
    near = get_close_matches(str(first["input"]), words, n=1, cutoff=0.5)
    return SpecError(".".join(path), said, f"did you mean {near[0]!r}?" if near else "")
