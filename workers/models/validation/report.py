"""Result of a validation: findings, and checks that could not be run."""

from dataclasses import asdict, dataclass
from typing import Any

CHECKS = ("operators", "dtypes", "dynamic shapes", "custom operators", "lowering", "graph breaks", "memory")


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding.

    `level` is error (the model will not run), warning (slower, larger or different) or info. `where` is the module's
    path in the model and, if available, the source line.
    """

    level: str
    check: str
    where: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Findings of the checks that ran, and in `checks_not_run` the reason of each of CHECKS that did not run."""

    kind: str
    findings: tuple[Problem, ...]
    checks_run: tuple[str, ...]
    checks_not_run: dict[str, str]

    @property
    def ok(self) -> bool:
        """True if no check that ran reported an error. Checks that did not run might report one."""
        return not any(problem.level == "error" for problem in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{p.level}: {p.check}: {p.message} (at {p.where}); {p.remedy}" for p in self.findings]
        lines += [f"not checked: {name}: {reason}" for name, reason in self.checks_not_run.items()]
        return "\n".join([f"{self.kind}: {'fits' if self.ok else 'does not fit'}", *lines])
