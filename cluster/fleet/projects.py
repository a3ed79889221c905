"""Projects of a fleet file: how many devices each may use."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from cluster.catalogue import resolve_kind
from cluster.input.validation_errors import WrongValueError, prefix_field

MAX_DEVICES = 1_000_000


def _quota(value: Any) -> Any:
    if not isinstance(value, dict):
        raise WrongValueError("must be a mapping of kinds to numbers", 'e.g. {"nvidia:H100": 8, cpu: 4}')
    quota = {prefix_field(resolve_kind, str(kind)): _number(str(kind), number) for kind, number in value.items()}
    if len(quota) < len(value):
        raise WrongValueError("names one kind twice", f"it means {', '.join(quota)}; write each once")
    return quota


def _number(kind: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_DEVICES:
        raise WrongValueError(f"{number!r} is not a number of {kind} devices", "write an integer from 0 on")
    return number


class ProjectSpec(BaseModel, extra="forbid", frozen=True):
    """A project and the devices that its jobs may use together."""

    quota: Annotated[dict[str, int], BeforeValidator(_quota)] = Field(
        default_factory=dict, description="Maximum devices by kind or by back end; kinds not listed are unlimited"
    )
    borrow: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Jobs may use more devices while no other project needs them, and give them back on demand",
    )


def plain_name(name: str) -> str:
    if not name or not name.isprintable() or len(name) > 63 or name != name.strip():
        raise WrongValueError(f"{name[:80]!r} is not a project name", "use 1 to 63 letters, digits, '-' and '_'")
    return name


ProjectName = Annotated[str, AfterValidator(plain_name)]
Projects = Annotated[dict[ProjectName, ProjectSpec], Field(max_length=1000)]
