"""What validation found, and what it could not look at."""

from dataclasses import asdict, dataclass
from typing import Any

CHECKS = ("operators", "dtypes", "dynamic shapes", "custom operators", "lowering", "graph breaks", "memory")


@dataclass(frozen=True, slots=True)
class Problem:
    """`level` is error (it will not run), warning (slower, larger or different) or info. `where` is the module's path
    in the model, and the line of its source where that is known.
    """

    level: str
    check: str
    where: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """`checks_not_run` has the reason of each of CHECKS that was not made: what it would find is unknown."""

    kind: str
    findings: tuple[Problem, ...]
    checks_run: tuple[str, ...]
    checks_not_run: dict[str, str]

    @property
    def ok(self) -> bool:
        """Nothing was found that keeps the model from running. It says nothing of checks that were not run."""
        return not any(problem.level == "error" for problem in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{p.level}: {p.check}: {p.message} (at {p.where}); {p.remedy}" for p in self.findings]
        lines += [f"not looked at: {name}: {reason}" for name, reason in self.checks_not_run.items()]
        return "\n".join([f"{self.kind}: {'fits' if self.ok else 'does not fit'}", *lines])
