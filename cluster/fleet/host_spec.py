"""Fields of a fleet file for other machines: `head`, `ssh`, and the `hosts` of a pool."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from cluster.fleet.fleet_record import name_of
from cluster.input.text_fields import WrittenAs
from cluster.input.validation_errors import WrongValueError

HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:]{2,39}")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
JUMP = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}(:[0-9]{1,5})?")
MAX_HOSTS = 256


def _host(value: str) -> str:
    """Check a host name; ssh cannot mistake a valid one for an option or a command."""
    if not HOST.fullmatch(value):
        raise WrongValueError(f"{value!r} is not a host name", "write a name that `ssh` can resolve, or an IP address")
    return value


def _address(value: str) -> str:
    if not value:
        return value
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise WrongValueError(f"{value!r} is not an IP address", "write one such as 10.0.0.8") from None


def _user(value: str) -> str:
    if value and not USER.fullmatch(value):
        raise WrongValueError(f"{value!r} is not a user name", "write the name of the user on that host")
    return value


def _jump(value: str) -> str:
    if value and not all(JUMP.fullmatch(part) for part in value.split(",")):
        raise WrongValueError(
            f"{value!r} is not a list of jump hosts", "write HOST or USER@HOST:PORT, or several separated by commas"
        )
    return value


def _file(value: str) -> str:
    if value and not value.startswith(("/", "~/")):
        raise WrongValueError(f"{value!r} is not an absolute path", "write the file's path from / or from ~/")
    return value


Address = Annotated[str, AfterValidator(_address)]
File = Annotated[str, AfterValidator(_file)]


class SSHSpec(BaseModel, extra="forbid", frozen=True):
    """How `ssh` reaches a host. The user's SSH settings apply to fields left out.

    No password or key is stored.
    """

    user: Annotated[str, AfterValidator(_user)] = Field(default="", description="User on the host")
    key: File = Field(default="", description="File of the private key, on this machine")
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = Field(
        default=0, description="Port of the SSH server (0: from SSH's settings)"
    )
    config: File = Field(default="", description="Configuration file of `ssh` (default: ~/.ssh/config)")
    jump: Annotated[str, AfterValidator(_jump)] = Field(
        default="", description="Jump hosts, as after `ssh -J`; their users and keys come from SSH's settings"
    )

    def with_defaults(self, other: "SSHSpec | None") -> "SSHSpec":
        """Return these settings, completed by `other`'s."""
        if other is None:
            return self
        return SSHSpec(**(other.model_dump() | {k: v for k, v in self.model_dump().items() if v}))

    def files(self) -> list[tuple[str, Path]]:
        """Return the field and the path of each file that must exist."""
        return [(name, Path(text).expanduser()) for name in ("key", "config") if (text := getattr(self, name))]


class HostSpec(BaseModel, extra="forbid", frozen=True):
    """One machine of a pool. A string alone is the name by which `ssh` reaches it."""

    host: Annotated[str, AfterValidator(_host)] = Field(description="Name by which `ssh` reaches it")
    address: Address = Field(
        default="", description="IP address at which the other nodes reach it (default: looked up by its name)"
    )
    devices: Annotated[int, Field(strict=True, ge=1, le=256)] | None = Field(
        default=None, description="Number of devices of this host (default: the pool's `devices`)"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, data: Any) -> Any:
        return {"host": data} if isinstance(data, str) else data

    @property
    def name(self) -> str:
        """The host's part of names of nodes: a-z, 0-9 and '-'."""
        return name_of(self.host)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler.resolve_ref_schema(handler(schema))]}


class HeadSpec(BaseModel, extra="forbid", frozen=True):
    """Where the head runs: on the machine on which `polyfleet up` is run, unless a `host` is named."""

    host: Annotated[str, AfterValidator(lambda name: name and _host(name))] = Field(
        default="",
        description='Machine that runs Ray\'s head, by the name by which `ssh` reaches it ("": this machine)',
    )
    address: Address = Field(default="", description="IP address of that machine for the hosts of the pools")
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = Field(
        default=0, description="TCP port of Ray's state server (0: any free port)"
    )

    @property
    def host_name(self) -> str:
        """Like `HostSpec.name`; "" for this machine."""
        return name_of(self.host)


Hosts = Annotated[
    tuple[Annotated[HostSpec, WrittenAs(HostSpec | str)], ...],
    Field(max_length=MAX_HOSTS),
]
