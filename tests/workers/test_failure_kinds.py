"""The table of failure kinds is the only place that lists them: a row is enough for a new one."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.protocol.failure_kinds import FAILURE_KINDS, REACTIONS, UNREPORTED, failure_kind

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "workers/protocol/failure_kinds.py"
PRODUCT = [path for wing in ("cluster", "workers", "orchestrator") for path in sorted((ROOT / wing).rglob("*.py"))]

NEW_ROW = """
import sys
sys.path.insert(0, "docs")
from workers.protocol import failure_kinds as table

table.FAILURE_KINDS["flood"] = table.FailureKind(
    meaning="water in the rack", remedy="pump", cause_rank=2, reaction="next", is_reported_by_rank=True,
    exit_codes="without signals",
)

from orchestrator.core.attempt import attempt_outcome
from orchestrator.core.controller.attempts import AttemptPart
from orchestrator.core.jobs.retry import AttemptEnd, decide_retry
from orchestrator.core.model import Candidate, Job, Recovery
from orchestrator.spec.job_spec_parts import RecoverySpec
from tests.simulator import users
from workers.attempt.supervision import outcome
from workers.protocol.messages import Failure, Outcome

assert Failure.parse({"kind": "flood"}).kind == "flood"

rank = outcome.FailedRank(0, "a", 1, 1, {"kind": "flood", "message": "wet"}, "", False, "", 0)
assert outcome._reported_failure(rank) == Failure(0, "a", "flood", "wet", exit_code=1)

job = Job("j", "j", "run", (Candidate(("cpu",)), Candidate(("any",))), recovery=Recovery(max_restarts=1))
decided = decide_retry(job, AttemptEnd("failed", 0, "flood", "wet", (-9,), ("a",)))
assert (decided.event, decided.reason, decided.first_candidate) == ("interrupted", "restart 1 of 1: wet", 1), decided

parts = [
    AttemptPart(node, "", (), outcome=Outcome("j", 1, rank, "failed", {rank: 1}, Failure(rank, node, kind, kind)))
    for rank, (node, kind) in enumerate([("a", "user"), ("b", "flood")])
]
ranks = [attempt_outcome._cause_rank(part, None) for part in parts]
assert ranks == [4, 2], ranks

assert RecoverySpec(on_events={"flood": "fail"}).parsed.on_events == {"flood": "fail"}
assert "flood" in str(RecoverySpec.model_json_schema())
assert "flood" in users.FAILURES

import generate
assert "| `flood` | water in the rack | restart | the next one | pump |" in list(generate.failures())
"""


def test_a_new_row_is_all_that_a_new_kind_needs_besides_its_detection():
    done = subprocess.run([sys.executable, "-c", NEW_ROW], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def lists_of_kinds(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Lines of collections and mappings that contain at least two kinds as literals."""
    for node in ast.walk(tree):
        values = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        texts = {value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}
        if len(kinds := texts & FAILURE_KINDS.keys()) > 1:
            yield node.lineno, kinds


def test_no_other_module_of_the_product_lists_kinds():
    modules = {path: ast.parse(path.read_text()) for path in PRODUCT}
    assert list(lists_of_kinds(modules.pop(TABLE)))
    found = {f"{path}:{line}": kinds for path, tree in modules.items() for line, kinds in lists_of_kinds(tree)}
    assert not found, "read these from a column of workers/protocol/failure_kinds.py"


@pytest.mark.parametrize("name", FAILURE_KINDS)
def test_a_kind_says_in_a_clause_what_it_means_and_what_to_do(name):
    kind = FAILURE_KINDS[name]
    for text in (kind.meaning, kind.remedy):
        assert text and text == text.strip() and not text.endswith(".") and "|" not in text
    assert kind.reaction in REACTIONS
    page, _, part = kind.guide.partition("#")
    headings = (ROOT / "docs/guides" / page).read_text().lower().splitlines() if page else []
    assert not page or any(line.lstrip("# ").replace("`", "").replace(" ", "-") == part for line in headings)


def test_a_failure_without_a_kind_follows_the_rules_of_user_code():
    user = FAILURE_KINDS["user"]
    assert failure_kind("") is UNREPORTED
    assert (UNREPORTED.cause_rank, UNREPORTED.reaction, UNREPORTED.exit_codes) == (4, user.reaction, user.exit_codes)
    with pytest.raises(KeyError):
        failure_kind("flood")
