"""What is told of a checkpoint, and of moving it: one small table of dtypes, sizes and times as people read them."""

from rich.console import Console

from orchestrator.show.checkpoints import checkpoints, report

PLAN = {
    "step": 7,
    "source": {"backend": "cpu", "kind": "cpu"},
    "target": {"backend": "tpu", "kind": "tpu:emulated", "count": 1},
    "bytes": 5 << 20,
    "ok": True,
    "dtypes": [
        {"dtype": "float64", "tensors": 2, "bytes": 4 << 20, "action": "convert", "to": "float32", "may_lose": True,
         "reason": "no float64 there", "example": "model/weight"},
    ],
    "random": {"python": "continued", "xla": "derived: saved on cpu"},
}  # fmt: skip


def lines(shown):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_a_plan_is_a_table_of_dtypes_and_names_what_cannot_go_on():
    assert lines(report(PLAN)) == [
        *("step 7", "size 5.0 MiB", "saved on cpu", "moves to 1 × tpu:emulated", "can move yes", ""),
        "DTYPE TENSORS BYTES ACTION TO MAY LOSE REASON",
        "float64 2 4.0 MiB convert float32 yes no float64 there",
        *("", "random numbers of xla: derived: saved on cpu"),
    ]


def test_a_copy_tells_how_much_in_how_long_and_then_the_same_table():
    copied = {
        "source": "cpu:a/step-7",
        "target": "xla:b/step-7",
        "step": 7,
        "files": 1,
        "bytes": 5 << 20,
        "seconds": 0.25,
        "already_there": False,
        "verified": True,
        "to_kind": "tpu:emulated",
        "plan": PLAN,
    }
    told = lines(report(copied))
    assert told[3:6] == ["copied 5.0 MiB in 1 file, 250 ms", "verified yes", "for kind tpu:emulated"]
    assert told[7:9] == lines(report(PLAN))[6:8]
    again = lines(report(copied | {"already_there": True, "files": 0, "bytes": 0}))
    assert again[3] == "copied nothing, it was there already"


def test_a_damaged_checkpoint_is_told_in_the_list_and_only_then_there_is_such_a_column():
    sound = {"pool": "p", "path": "a/step-1", "step": 1, "bytes": 10, "producer": {"kind": "cpu"}, "created": "now"}
    damaged = sound | {"bytes": 0, "producer": {"kind": ""}, "created": "", "problem": "MANIFEST.json is cut off"}
    assert lines(checkpoints([sound]))[0] == "CHECKPOINT STEP SIZE KIND SAVED"
    assert lines(checkpoints([sound, damaged])) == [
        "CHECKPOINT STEP SIZE KIND SAVED PROBLEM",
        "p:a/step-1 1 10 B cpu now",
        "p:a/step-1 1 MANIFEST.json is cut off",
    ]
