"""What a fleet file says of its projects: how many devices each may have."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from cluster.catalogue import require_known_kind
from cluster.validation_errors import WrongValueError, prefix_field

MOST_DEVICES = 1_000_000


def _quota(value: Any) -> Any:
    if not isinstance(value, dict):
        raise WrongValueError("must be a mapping of kinds to numbers", 'e.g. {"nvidia:H100": 8, cpu: 4}')
    found = {prefix_field(require_known_kind, str(word)): _number(str(word), number) for word, number in value.items()}
    if len(found) < len(value):
        raise WrongValueError("names one kind twice", f"it means {', '.join(found)}; write each once")
    return found


def _number(kind: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST_DEVICES:
        raise WrongValueError(f"{number!r} is no number of {kind} devices", "write a whole number from 0 on")
    return number


class ProjectSpec(BaseModel, extra="forbid", frozen=True):
    """A project and what its jobs may have together."""

    quota: Annotated[dict[str, int], BeforeValidator(_quota)] = Field(
        default_factory=dict, description="Devices by kind, or by back end; of others it may have any number"
    )
    borrow: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Its jobs may have more of what nobody else wants, and give it back when asked"
    )


def plain_name(name: str) -> str:
    if not name or not name.isprintable() or len(name) > 63 or name != name.strip():
        raise WrongValueError(f"{name[:80]!r} is no name of a project", "use 1 to 63 letters, digits, '-' and '_'")
    return name


ProjectName = Annotated[str, AfterValidator(plain_name)]
Projects = Annotated[dict[ProjectName, ProjectSpec], Field(max_length=1000)]
