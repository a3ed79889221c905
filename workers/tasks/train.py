"""Train task: run the user's `def train(ctx)` inside the process group of the ranks."""

from typing import Any

from workers.protocol.json_values import plain
from workers.tasks.context import Context
from workers.tasks.entry import check_call, load_function


def main(context: Context) -> dict[str, Any]:
    """Run the entry; its exceptions are not caught. The result has the last report and, for a dict, `returned`."""
    function = load_function(context.entry, default="train")
    check_call(function, context.entry if ":" in context.entry else f"{context.entry}:train", "ctx")
    with context.running():
        returned = function(context)
        context.backend.synchronize()
    if context.stop.is_observed:
        context.events.preempted()
    result: dict[str, Any] = {
        "last_step": context.last_step,
        "metrics": context.last_report,
        "checkpoints": context.checkpoint.saved,
        "checkpoint_blocked_s": context.checkpoint.blocked_s,
    }
    return result | ({"returned": plain(returned)} if isinstance(returned, dict) else {})
