"""Traces, throughputs and fleets as people write them: what is read, and what is refused with its place."""

import re

import numpy as np
import pytest

from cluster.errors import UserError
from orchestrator.simulation.fleets import read_fleet
from orchestrator.simulation.traces import read_throughputs, read_trace, read_window

HEADER = "job_id,arrival_time_s,job_type,scale_factor,total_steps\n"
THROUGHPUTS = """job_type,scale_factor,v100_steps_per_s,k80_steps_per_s,v100_unconsolidated_steps_per_s
resnet,1,10,2,10
resnet,4,30,0.0,20
bert,1,5,,5
"""


@pytest.fixture
def read(tmp_path):
    """`read(trace, throughputs, fleet)` of the texts."""

    def reading(trace=HEADER + "0,0,resnet,1,100\n", throughputs=THROUGHPUTS, fleet="v100=4,k80=4"):
        (tmp_path / "trace.csv").write_text(trace)
        (tmp_path / "rates.csv").write_text(throughputs)
        kinds = read_fleet(fleet)
        return read_trace(tmp_path / "trace.csv", read_throughputs(tmp_path / "rates.csv", kinds), kinds)

    return reading


def test_jobs_come_in_the_order_of_their_submission_with_rates_of_the_fleet(read):
    trace = read(HEADER + "7,30,bert,1,50\n3,10,resnet,4,60\n5,10,resnet,1.0,70.5\n", fleet="k80=2, v100=4")
    assert trace.job_id.tolist() == [3, 5, 7]
    assert trace.arrival_s.tolist() == [0.0, 0.0, 20.0]
    assert trace.gang.tolist() == [4, 1, 1]
    assert trace.steps.tolist() == [60.0, 70.5, 50.0]
    assert trace.rate.tolist() == [[0.0, 2.0, 0.0], [30.0, 10.0, 5.0]]
    assert trace.isolated_s.tolist() == [2.0, 7.05, 10.0]


def test_a_kind_too_small_for_a_gang_has_no_rate_for_it(read):
    trace = read(HEADER + "0,0,resnet,4,60\n", THROUGHPUTS.replace("0.0,20", "60,20"), "v100=4,k80=2")
    assert trace.rate.tolist() == [[30.0], [0.0]]


def test_more_columns_a_byte_order_mark_and_empty_lines_are_taken(read):
    text = "\ufeff" + HEADER.replace("\n", ",v100_duration_s\n") + '\n0,0,"resnet",1,100,7.5\n\n'
    assert read(text).jobs == 1


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0,0,resnt,1,9", "trace.csv, row 2, job_type: 'resnt' is not in the throughputs; did you mean 'resnet'?"),
        ("0,0,resnet,1,nan", "trace.csv, row 2, total_steps: 'nan' is not a number above 0"),
        ("0,0,resnet,1,-5", "total_steps: '-5' is not a number above 0; write a number above 0; did you mean 5?"),
        ("0,0,resnet,1,0", "total_steps: '0' is not a number above 0"),
        ("0,0,resnet,1,inf", "total_steps: 'inf' is not a number above 0"),
        ("0,0,resnet,1,many", "total_steps: 'many' is not a number above 0"),
        ("0,0,resnet,1,", "total_steps: '' is not a number above 0"),
        ("0,0,resnet,1,1e300", "total_steps: the job would run for centuries; the maximum is 1e+11"),
        ("0,0,resnet,1.6,9", "scale_factor: '1.6' is not an integer of 1 or more; the nearest valid is 2"),
        ("0,0,resnet,0,9", "scale_factor: '0' is not an integer of 1 or more; the nearest valid is 1"),
        ("0,0,resnet,nan,9", "scale_factor: 'nan' is not an integer of 1 or more"),
        ("0,0,resnet,inf,9", "scale_factor: 'inf' is not an integer of 1 or more"),
        ("0,0,resnet,3,9", "scale_factor: the throughputs have no 'resnet' with scale_factor 3; the nearest is 4"),
        ("0,-1,resnet,1,9", "arrival_time_s: '-1' is not a number of 0 or more"),
        ("0,nan,resnet,1,9", "arrival_time_s: 'nan' is not a number of 0 or more"),
        ("0,1e99,resnet,1,9", "arrival_time_s: '1e99' is more than 1e+10"),
        ("x,0,resnet,1,9", "job_id: 'x' is not an integer of 0 or more"),
        ("0,0,resnet,1,9\n0,1,bert,1,9", "trace.csv, row 3, job_id: job 0 is in row 2 already"),
        ("0,0,resnet,1", "trace.csv, row 2: 4 fields, the header has 5"),
        ('0,0,"resnet,1,9', "trace.csv, row 2: not CSV: unexpected end of data"),
        ("", "trace.csv: no row after the header"),
    ],
    ids=str,
)
def test_a_row_that_is_wrong_is_told_with_its_field(read, rows, told):
    with pytest.raises(UserError, match=re.escape(told)):
        read(f"{HEADER}{rows}\n" if rows else HEADER)


def test_a_job_that_no_kind_of_the_fleet_can_run_is_named(read):
    told = "trace.csv, row 3, job_type: no kind of the fleet (k80) runs 'bert' with scale_factor 1"
    with pytest.raises(UserError, match=re.escape(told)):
        read(HEADER + "0,0,resnet,1,9\n1,0,bert,1,9\n", fleet="k80=4")


def test_a_gang_larger_than_every_kind_that_runs_it_is_named(read):
    told = "row 2, scale_factor: 4 devices of one kind are more than the fleet's v100=2; the nearest valid is 2"
    with pytest.raises(UserError, match=re.escape(told)):
        read(HEADER + "0,0,resnet,4,9\n", fleet="v100=2,k80=8")


@pytest.mark.parametrize("column", HEADER.strip().split(","))
def test_a_trace_without_a_column_is_told_which(read, column):
    with pytest.raises(UserError, match=f"trace.csv, row 1: no column '{column}'; its columns: "):
        read(HEADER.replace(column, "other") + "0,0,resnet,1,9\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("job_type", "type"), "rates.csv, row 1: no column 'job_type'"),
        (("resnet,1,10", "resnet,1,ten"), "rates.csv, row 2, v100_steps_per_s: 'ten' is not a number of 0 or more"),
        (("resnet,1,10", "resnet,1,-10"), "row 2, v100_steps_per_s: '-10' is not a number of 0 or more"),
        (("resnet,4", "resnet,1"), "row 3, job_type: 'resnet' with scale_factor 1 is in row 2 already"),
        (("v100_unconsolidated", "v100"), "rates.csv, row 1: column 'v100_steps_per_s' appears twice"),
    ],
    ids=str,
)
def test_throughputs_that_are_wrong_are_told_with_their_place(read, change, told):
    with pytest.raises(UserError, match=re.escape(told)):
        read(throughputs=THROUGHPUTS.replace(*change))


def test_a_kind_without_a_column_names_the_nearest(read):
    told = "--fleet: rates.csv has no column 'v10_steps_per_s'; did you mean 'v100'? valid: v100, k80"
    with pytest.raises(UserError, match=re.escape(told)):
        read(fleet="v10=4")


@pytest.mark.parametrize(
    "text", ["", "v100", "v100=", "=4", "v100=0", "v100=-1", "v100=1.5", "v100=4,", "v100=9999999", "v100=²", "a b=x"]
)
def test_a_fleet_that_is_not_kinds_and_numbers_is_refused(text):
    with pytest.raises(UserError, match=r"--fleet: .* is not kind=devices .*; write it like v100=36,p100=36,k80=36"):
        read_fleet(text)


def test_a_kind_named_twice_is_refused():
    with pytest.raises(UserError, match="--fleet: v100 is named twice"):
        read_fleet("v100=1,v100=2")


def test_a_window_is_ids_from_the_first_to_below_the_second(read):
    trace = read(HEADER + "".join(f"{job},{10 - job},resnet,1,9\n" for job in range(5)))
    assert trace.job_id[read_window("1:3", trace)].tolist() == [2, 1]
    assert read_window("0:5", trace).all()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("3", "--window: '3' is not a:b with two integers; write it like 2:6"),
        ("a:b", "--window: 'a:b' is not a:b"),
        ("-1:3", "--window: '-1:3' is not a:b"),
        ("1:4", "--window: 1:4 is not within the job ids 2 to 5 of trace.csv; the nearest valid window is 2:4"),
        ("4:9", "the nearest valid window is 4:6"),
        ("100:300", "the nearest valid window is 5:6"),
        ("4:4", "the nearest valid window is 4:5"),
        ("5:3", "the nearest valid window is 5:6"),
    ],
    ids=str,
)
def test_a_window_outside_the_trace_names_the_nearest(read, text, told):
    trace = read(HEADER + "".join(f"{job},0,resnet,1,9\n" for job in range(2, 6)))
    with pytest.raises(UserError, match=re.escape(told)):
        read_window(text, trace)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"PK\x03\x04\x00\x00", b"a,b\x00c\n"], ids=str)
def test_what_is_no_text_is_no_csv_file(tmp_path, content):
    (tmp_path / "rates.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"rates.csv is not a CSV file"):
        read_throughputs(tmp_path / "rates.csv", read_fleet("v100=1"))


def test_a_file_that_is_absent_and_a_folder_are_told(tmp_path):
    for path, why in ((tmp_path / "absent.csv", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"{re.escape(str(path))} cannot be read: {why}"):
            read_throughputs(path, read_fleet("v100=1"))


def test_an_empty_file_has_no_columns(read):
    with pytest.raises(UserError, match=re.escape("trace.csv, row 1: no column 'job_id'; its columns: none")):
        read("")


def test_rates_are_numbers(read):
    assert read().rate.dtype == np.float64
