"""A script's own checkpoint through the real service: the next attempt finds the last whole one, and `show` says so."""

import sys
import zipfile
from pathlib import Path

import pytest
import torch
from patience import LIMIT_S, wait_for

from orchestrator.client import client as http

HALF_WRITTEN = """
import os, pathlib, sys, time, zipfile
out = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"])
if resume := os.environ.get("POLYFLEET_RESUME_PATH"):
    assert resume == str(out / "run" / "ckpt.pt"), resume
    print("in", os.environ["POLYFLEET_BACKEND"], b"cuda:0" in zipfile.ZipFile(resume).read("whole/data.pkl"))
    sys.exit()
whole = pathlib.Path(sys.argv[1]).read_bytes()
(out / "run").mkdir()
(out / "run" / "ckpt.pt").write_bytes(whole)
while not list(out.glob(".polyfleet/checkpoint-*/ckpt.pt")):
    time.sleep(0.1)
(out / "run" / "ckpt.pt").write_bytes(whole[: len(whole) // 2])
(out / "is-half-written").touch()
time.sleep(600)
"""
ENDS = """
import os, pathlib, sys
out = pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"])
if os.environ["POLYFLEET_EPOCH"] == "1":
    (out / "state").write_bytes(bytes.fromhex(sys.argv[1]))
    sys.exit(75)
print("resumes from", os.environ.get("POLYFLEET_RESUME_PATH", "nothing")[-14:], sorted(p.name for p in out.iterdir()))
"""


@pytest.fixture
def client(live):
    with http.connect(start=False) as client:
        yield client


def run(code: str, *words: str, path: str, **more):
    told = {"command": [sys.executable, "-c", code, *words], "checkpoint": {"path": path}}
    return told | {"recovery": {"retry_exit_codes": [75], "backoff": 0}} | more


def said(client, job: str) -> str:
    return "".join(f"{line['text']}\n" for line in client.jobs.logs(job)["lines"])


def test_a_save_that_was_cut_off_is_replaced_by_the_last_whole_one_which_loads_in_another_pool(live, client, tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "whole.pt")
    told = zipfile.ZipFile(tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "cuda.pt", "w") as tagged:
        for name in told.namelist():
            tagged.writestr(name, told.read(name).replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"))
    job = client.jobs.submit(
        run(HALF_WRITTEN, str(tmp_path / "cuda.pt"), path="run/ckpt.pt", resources={"pool": "cpu"})
    )["id"]
    wait_for(lambda: list((live.home / "storage" / "cpu" / job).glob("output-1/is-half-written")))
    client.jobs.migrate(job, "xla")
    view = client.wait(job, timeout_s=LIMIT_S)
    assert (view["state"], view["pool"]) == ("SUCCEEDED", "xla"), view
    assert said(client, job) == "in tpu False\n"
    assert view["script_checkpoint"].startswith("run/ckpt.pt was half written (it was not written completely")
    assert "restored its last complete version, of " in view["script_checkpoint"]
    assert view["script_checkpoint"].endswith("; its 2 tensors of cuda:0 are on the CPU now")
    assert Path(live.home / "storage" / "xla" / job / "output-2" / "run" / "ckpt.pt.torn").is_file()


@pytest.mark.parametrize(
    ("written", "log", "record"),
    [
        (
            b"a form of its own",
            "output-2/state ['state']",
            "state is passed on without a check: its format is unknown",
        ),
        (b"PK\3\4half", "nothing ['state.torn']", "was moved to state.torn; there is no complete version"),
        (b"", "nothing ['state.torn']", "state was half written (it has 0 bytes) and was moved to state.torn"),
    ],
)
def test_what_cannot_be_read_goes_on_and_what_is_half_of_a_checkpoint_does_not(live, client, written, log, record):
    view = live.ran(run(ENDS, written.hex(), path="state", resources={"pool": "cpu"}))
    assert said(client, view["id"]) == f"resumes from {log}\n"
    assert record in view["script_checkpoint"] and view["resumed_step"] is None
