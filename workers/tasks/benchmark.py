"""Benchmark task: measure forward and training step of the entry's model in a session on this device.

In a benchmark run over the fleet, serve a session that measures the cases that the run requests.
"""

import random
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from cluster.errors import PolyfleetError, UserError, nearest
from workers.benchmark.host import classify
from workers.benchmark.measurement import Unsupported
from workers.benchmark.session import Session
from workers.benchmark.session_server import serve
from workers.devices.backends.base import BaseBackend
from workers.devices.backends.dtype_checks import require_dtype
from workers.devices.backends.precision import name_of, precision_of
from workers.measurement import statistics
from workers.measurement.inputs import Sample
from workers.models.validation import activations
from workers.options.optimization_levels import OptimizationLevel
from workers.protocol.json_values import plain
from workers.tasks import model_factory
from workers.tasks.context import Context
from workers.tasks.transformers_model import MissingLibraryError

ROUNDS, WARMUP = 15, 1
STEPS = 3
ARGUMENTS = ("rounds", "warmup", "level", "precision", "train", "sample_input", "batch_size", "session", "trace")
MODES = {"forward": "forward", "training_step": "train"}
"""Row names of the result -> the session's mode."""
CONTROL = "again"
HASHES = ("weights_sha256", "inputs_sha256")
Data = dict[str, Any]


def main(context: Context) -> Data:
    """Return rows of timings and accuracy, the state of the host, and hashes that identify equal workloads."""
    if context.arguments.get("session"):
        return _session(context)
    if context.arguments.get("trace"):
        return _trace(context)
    options = _parse_options(context)
    model, sample = model_factory.make_model(context), model_factory.make_sample(context)
    if sample is None:
        raise UserError(
            "a benchmark needs inputs",
            f"add sample_input(batch_size) beside {context.entry}, or set the argument sample_input",
        )
    with context.backend as backend:
        session = Session(backend, context.seed, lambda: (model, sample))
        opened = _open(context, options, session)
        state_before = session.state()
        blocks = _rounds(context, options, session, opened)
        machine = classify(state_before, session.state())
        session_facts = session.describe()
        session.close()
    if context.stop.is_observed:
        context.events.preempted()
    rows = [_row(case, facts, blocks[case]) for case, facts in opened.items()]
    for row in rows:
        _print_line(_sentence(row))
    job_facts = _facts(context, options, session_facts) | {"parameters": model_factory.parameter_count(model)}
    noise = statistics.noise(blocks["forward"], blocks[CONTROL])
    hashes = {name: opened["forward"][name] for name in HASHES}
    result: Data = plain({"rows": rows, "noise": noise, "host": machine} | hashes | job_facts)
    return result


@dataclass(frozen=True, slots=True)
class _Options:
    """Checked arguments. `warmup` rounds run before the counted ones and are discarded."""

    rounds: int
    warmup: int
    level: str
    precision: str
    cases: tuple[str, ...]


def _parse_options(context: Context) -> _Options:
    arguments = context.arguments
    if unknown := sorted(arguments.keys() - set(ARGUMENTS)):
        raise UserError(f"a benchmark has no argument {unknown[0]!r}", nearest(unknown[0], ARGUMENTS))
    train = arguments.get("train", True)
    if not isinstance(train, bool):
        raise UserError(f"train is {train!r}", "give true or false")
    return _Options(
        _count(arguments, "rounds", ROUNDS, 1),
        _count(arguments, "warmup", WARMUP, 0),
        OptimizationLevel.from_string(arguments.get("level") or "O1").value,
        name_of(precision_of(arguments.get("precision") or context.precision)),
        ("forward", "training_step") if train else ("forward",),
    )


def _open(context: Context, options: _Options, session: Session) -> dict[str, Data]:
    """Open the cases and return their facts; cases not yet open when a stop is requested are missing."""
    opened: dict[str, Data] = {}
    for case in options.cases:
        if opened and context.preempted:
            break
        settings = {
            "case": f"user/{context.entry}/{MODES[case]}",
            "precision": options.precision,
            "level": options.level,
        }
        try:
            facts = opened[case] = session.open_case(case, settings)
        except Unsupported as e:
            raise _unsupported_error(case, e) from None
        prepared, first = (_seconds(facts[key]) for key in ("prepare_s", "first_call_s"))
        _print_line(f"{case}: prepared in {prepared}, first call {first}; {_accuracy_text(facts)}")
        if facts.get("note"):
            _print_line(f"{case}: {facts['note']}")
    return opened


def _unsupported_error(case: str, reason: Unsupported) -> UserError:
    remedy = reason.__cause__.remedy if isinstance(reason.__cause__, PolyfleetError) else ""
    usual = "use another precision or level" if case == "forward" else "set train: false in the job's arguments"
    return UserError(f"{case}: {reason}", remedy or usual)


def _rounds(context: Context, options: _Options, session: Session, opened: dict[str, Data]) -> dict[str, list[Data]]:
    """Measure blocks by case, in random order in each round; a case with wrong results has none. The first case is
    measured twice per round: the difference is the machine's noise (A/A control)."""
    blocks: dict[str, list[Data]] = {case: [] for case in (*MODES, CONTROL)}
    turns = [(case, case) for case, facts in opened.items() if facts["accuracy"]["ok"] is not False]
    turns += [(CONTROL, "forward")] if ("forward", "forward") in turns else []
    for number in range(-options.warmup, options.rounds if turns else -options.warmup):
        if context.preempted:
            break
        order = turns[:]
        random.Random(f"{context.seed}/{number}").shuffle(order)  # noqa: S311 - not a secret
        measured = {name: session.run_block(opened_case) | {"round": number} for name, opened_case in order}
        if number >= 0:
            for name, block in measured.items():
                blocks[name].append(block)
            times_s = {f"{name}_s": statistics.call_s(block) for name, block in measured.items() if name != CONTROL}
            context.report(number + 1, of=options.rounds, **times_s)
    return blocks


def _row(case: str, facts: Data, blocks: list[Data]) -> Data:
    """Row of the result. A case with wrong results, or without a completed round, has no times."""
    wrong = facts["accuracy"]["ok"] is False
    samples_s = [statistics.call_s(block) for block in blocks]
    middle = statistics.interval(samples_s) if blocks else None
    return {
        "case": case,
        "status": "wrong" if wrong else "measured" if blocks else "skipped",
        "reason": facts["accuracy"]["reason"],
        "median_s": middle and middle.median,
        "ci_low_s": middle and middle.low,
        "ci_high_s": middle and middle.high,
        "items_per_s": middle and facts["items"] / middle.median,
        "single_call_s": median(block["single_call_s"] for block in blocks) if blocks else None,
        "samples_s": samples_s,
        **{name: value for name, value in facts.items() if name not in HASHES},
    }


def _facts(context: Context, options: _Options, session_facts: Data) -> Data:
    """Facts about the job, and about the device from the session."""
    copied = ("emulated", "torch", "versions", "threads", "timer", "timer_overhead_s")
    return {
        "kind": context.kind,
        "device_name": session_facts["device"]["device_name"],
        "precision": options.precision,
        "level": options.level,
        "batch_size": model_factory.batch_size(context),
    } | {name: session_facts[name] for name in copied}


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a rank's log is what it prints


def _sentence(row: Data) -> str:
    if row["median_s"] is None:
        return f"{row['case']}: not timed: {row['reason'] or 'the attempt was stopped before the first round'}"
    low, middle, high = (_seconds(row[key]) for key in ("ci_low_s", "median_s", "ci_high_s"))
    rate = f"{row['items_per_s']:,.0f}" if row["items_per_s"] >= 1000 else f"{row['items_per_s']:.4g}"
    return f"{row['case']}: {middle} per call ({low} to {high}, 95 %), {rate} items/s, {len(row['samples_s'])} rounds"


def _accuracy_text(facts: Data) -> str:
    accuracy = facts["accuracy"]
    if accuracy["ok"] is not True:
        return f"WRONG: {accuracy['reason']}" if accuracy["ok"] is False else str(accuracy["reason"])
    return (
        f"relative error {accuracy.get('rms_rel', 0.0):.1e} against "
        f"{accuracy['reference'].removeprefix('cpu ')} on the CPU"
    )


def _seconds(value: float) -> str:
    unit, name = next((u, n) for u, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if value >= u or n == "µs")
    return f"{value / unit:.4g} {name}"


def _trace(context: Context) -> dict[str, Any]:
    """Record fingerprints of what the model computes on this device; see workers/models/validation/activations.py."""
    model, sample = model_factory.make_model(context), model_factory.make_sample(context)
    if sample is None:
        raise UserError(
            "a validation needs inputs",
            f"add sample_input(batch_size) beside {context.entry}, or set the argument sample_input",
        )
    with context.backend as backend:
        require_dtype(backend, precision_of(context.precision))
        steps = _count(context.arguments, "steps", STEPS, 0)
        trace = activations.record(model, sample, backend, steps, lambda: backend.autocast(context.precision))
        info = backend.get_device_info(backend.device_id)
    device_facts = {"kind": context.kind, "device": info.device_name, "torch": str(torch.__version__)}
    return trace | device_facts | {"precision": name_of(precision_of(context.precision))}


def _session(context: Context) -> dict[str, Any]:
    """Serve until the run ends. Each device of this attempt has its own session, created on its first request."""
    sessions: dict[int, Session] = {}

    def user() -> tuple[nn.Module, Sample | None]:
        try:
            return model_factory.make_model(context), model_factory.make_sample(context)
        except MissingLibraryError as e:
            raise Unsupported(e.message) from e

    def handle(message: dict[str, Any]) -> Any:
        number = int(message.pop("device", 0))
        if number not in sessions:
            backend = context.backend if number == context.backend.device_id else _backend_for(context.backend, number)
            sessions[number] = Session(backend, context.seed, user if context.entry else None)
        return sessions[number].handle(message)

    with context.backend:
        folder = context.events.folder
        if folder is None:
            raise UserError("a session needs the folder of an attempt", "start it with `polyfleet benchmark run`")
        return {"session": serve(folder, handle, lambda: context.stop.requested)}


def _backend_for(backend: BaseBackend, number: int) -> BaseBackend:
    return type(backend)(backend.config, device_id=number)


def _count(arguments: dict[str, Any], name: str, default: int, minimum: int) -> int:
    value = arguments.get(name, default)
    if type(value) is not int or value < minimum:
        raise UserError(f"{name} is {value!r}", f"give an integer of at least {minimum}")
    return value
