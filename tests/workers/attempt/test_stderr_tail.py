import pytest

from workers.attempt.supervision.stderr_tail import LAST_LINES, StderrTail

TRACE = ["Traceback (most recent call last):", '  File "train.py", line 6, in <module>', "    step()"]
ROW, LINE = "=" * 60, "-" * 60
HELP = "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def failure(number, rank, code):
    return [f"[{number}]:", "  host      : n0", f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: 907) ", "  error_file: <N/A>", HELP]  # fmt: skip


def torchrun(root, code, others=1):
    """As torchrun 2.8 ends when ranks have failed; `root` is the rank of the first."""
    failed = [line for number in range(1, others + 1) for line in failure(number, root + number, -15)]
    wrapped = [
        *TRACE,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        ROW,
        "train.py FAILED",
        LINE,
    ]
    return [*wrapped, "Failures:", *failed, LINE, "Root Cause (first observed failure):", *failure(0, root, code), ROW]


def of_rank(rank, *lines):
    return [f"[rank{rank}]: {line}" for line in lines]


WHY = "ValueError: boom"
BOOM, CLOSED = [*TRACE, WHY], [*TRACE, "RuntimeError: Connection closed by peer [127.0.0.1]:649."]
HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
LAUNCHED = "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1."
SPAWNED = "torch.multiprocessing.spawn.ProcessRaisedException: "
LOAD = [
    *TRACE,
    "_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6 the default changed.",
    "\tWeightsUnpickler error: Unsupported global: GLOBAL config.Settings was not an allowed global by default.",
    "",
    "Check the documentation of torch.load to learn more about types accepted by default https://pytorch.org/docs.",
]


@pytest.mark.parametrize(
    ("lines", "reason"),
    {
        "nothing": ([], ""),
        "words": (["one", "cannot open data.bin", "", "  "], "cannot open data.bin"),
        "a traceback": (BOOM, WHY),
        "an error without text": ([*TRACE, "AssertionError"], "AssertionError"),
        "a module's error": ([*TRACE, "torch.cuda.OutOfMemoryError: no"], "torch.cuda.OutOfMemoryError: no"),
        "a cause and its effect": ([*BOOM, "", "During handling …", "", *TRACE, "KeyError: 'lr'"], "KeyError: 'lr'"),
        "text behind it": ([*BOOM, "", HYDRA], WHY),
        "warnings behind it": ([*BOOM, "[W1125 17:00 x.cpp:1] Warning: left", "/a.py:3: UserWarning: late"], WHY),
        "in colours": (["\x1b[31mTypeError\x1b[0m: no", "╰───╯"], "TypeError: no"),
        "torch.load": (LOAD, LOAD[3]),
        "a torchrun, the others fail of it": ([*of_rank(1, *BOOM), *of_rank(0, *CLOSED), *torchrun(1, 1)], WHY),
        "a torchrun, told out of order": ([*of_rank(0, *CLOSED), *of_rank(1, *BOOM), *torchrun(1, 1)], WHY),
        "a torchrun with 64 ranks": ([*of_rank(1, *BOOM), *of_rank(0, *CLOSED), *torchrun(1, 1, 64)], WHY),
        "a torchrun, first elsewhere": ([*of_rank(2, *CLOSED), *of_rank(3, *BOOM), *torchrun(9, 1)], CLOSED[3]),
        "a torchrun that names no rank's lines": ([*BOOM, *torchrun(0, 1)], WHY),
        "a torchrun, tee": ([f"[default1]:{line}" for line in BOOM] + torchrun(1, 1), WHY),
        "a torchrun whose ranks only exit": (torchrun(0, 3), "exitcode  : 3 (pid: 907)"),
        "ranks without a launcher": ([*of_rank(1, *BOOM), *of_rank(0, *CLOSED)], WHY),
        "accelerate": ([*BOOM, *TRACE, LAUNCHED], WHY),
        "torch.multiprocessing": ([*TRACE, SPAWNED, "", "-- Process 1 terminated", *BOOM], WHY),
        "an error of long ago": ([*BOOM, *["step"] * LAST_LINES, "out of luck"], "out of luck"),
        "only rows and links": ([ROW, LINE], LINE),
        "words that only look so": (["NoErrorHere", "the Error: x", "  ValueError: of code"], "ValueError: of code"),
    }.values(),
)  # fmt: skip
def test_the_reason_is_the_error_of_the_rank_that_failed_first_else_the_last_line_with_words(lines, reason):
    whole, pieces = StderrTail(), StderrTail()
    whole.add(lines)
    for line in lines:
        pieces.add([line])
    assert (whole.reason, pieces.reason) == (reason, reason)


def test_a_full_disk_is_seen_among_the_last_lines():
    tail = StderrTail()
    tail.add(["OSError: [Errno 28] No space left on device: 'a'", "and so on"])
    assert tail.mentions_full_disk
    tail.add(["step"] * LAST_LINES)
    assert not tail.mentions_full_disk
