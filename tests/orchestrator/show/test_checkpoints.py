"""What is told of a checkpoint, and of moving it: one small table of dtypes, sizes and times as people read them."""

from rich.console import Console

from orchestrator.show.checkpoints import checkpoints, conversion, copied, differences, planned

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
    "memory": {"needed_bytes": 4 << 20, "device_bytes": 16 << 30, "fits": "sharded"},
    "reshard": {"from": 2, "mesh": [2], "to": 1, "tensors_cut": 3},
    "cannot_follow": ["random numbers of xla: derived: saved on cpu"],
}  # fmt: skip


def lines(shown):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shown)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_a_plan_is_a_table_of_dtypes_and_names_what_cannot_go_on():
    assert lines(planned(PLAN)) == [
        *("step 7", "size 5.0 MiB", "saved on cpu", "moves to 1 × tpu:emulated"),
        *("memory 4.0 MiB needed, 16.0 GiB per device: fits when sharded", "shards 2 ranks to 1; 3 tensors are cut"),
        *("can move yes", ""),
        "DTYPE TENSORS BYTES ACTION TO MAY LOSE REASON",
        "float64 2 4.0 MiB convert float32 yes no float64 there",
        *("", "random numbers of xla: derived: saved on cpu"),
    ]


COPIED = {
    "source": "cpu:a/step-7",
    "target": "xla:b/step-7",
    "step": 7,
    "files": 1,
    "bytes": 5 << 20,
    "transferred_bytes": 1 << 20,
    "seconds": 0.25,
    "already_there": False,
    "verified": True,
}


def test_a_copy_tells_how_much_was_transferred_in_how_long():
    told = lines(copied(COPIED))
    assert told == [
        *("source cpu:a/step-7", "target xla:b/step-7", "step 7"),
        *("copied 1.0 MiB of 5.0 MiB transferred, 250 ms", "verified yes"),
    ]
    again = lines(copied(COPIED | {"already_there": True, "transferred_bytes": 0}))
    assert again[3] == "copied nothing: the target already has it"


def test_a_conversion_tells_each_tensor_that_changed_and_by_how_much():
    change = {"values_changed": 3, "new_inf": 1, "new_nan": 0, "max_abs_error": 0.25, "max_rel_error": 0.001}
    row = {"stored_dtype": "float32", "dtype": "bfloat16", "bytes": 8, "device": "cpu", "change": change}
    told = {"ref": "xla:b/step-7", "step": 7, "bytes": 5 << 20, "kept": 2, "lossy": 1, "notes": ["s times 2"]}
    seen = lines(conversion(told | {"converted": {"model/w": row}}))
    assert seen[-2:] == ["model/w float32 bfloat16 3 0.25 0.001 1 0", "s times 2"]
    assert "converted 1 tensors, 1 with changed values" in seen


def test_a_difference_is_one_line_per_tensor():
    row = {"name": "w", "dtype": "float32", "shape": [2], "changed": 1, "max_abs": 0.5, "max_rel": 0.1, "max_ulp": 7}
    other = {"name": "v", "dtype": "float32", "shape": [2], "dtype_b": "float32", "shape_b": [3]}
    told = {"a": "x", "b": "y", "same": False, "equal": 3, "tensors": [row, other]}
    seen = lines(differences(told | {"only_in_a": ["u"], "only_in_b": [], "entries": ["extra"]}))
    assert seen[-4:] == [*("w float32 [2] 1 0.5 0.1 7", "v float32 [2] / [3]", "only in a: u", "values differ: extra")]


def test_a_damaged_checkpoint_is_told_in_the_list_and_only_then_there_is_such_a_column():
    sound = {"ref": "p:a/step-1", "step": 1, "bytes": 10, "producer": {"kind": "cpu"}, "created": "now"}
    damaged = sound | {"bytes": 0, "producer": {"kind": ""}, "created": "", "problem": "MANIFEST.json is cut off"}
    assert lines(checkpoints([sound]))[0] == "CHECKPOINT STEP SIZE KIND SAVED"
    assert lines(checkpoints([sound, damaged])) == [
        "CHECKPOINT STEP SIZE KIND SAVED PROBLEM",
        "p:a/step-1 1 10 B cpu now",
        "p:a/step-1 1 MANIFEST.json is cut off",
    ]
