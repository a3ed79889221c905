"""Cases: their names, their formulas against torch's own count of operations, and that each can be built."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cluster.errors import NotFound
from workers.benchmark.cases import catalogue
from workers.benchmark.cases.case import FULL, QUICK, Case
from workers.benchmark.cases.case_builder import build
from workers.benchmark.cases.operations import KERNEL_OPERATIONS
from workers.benchmark.kernel_measurement import BACKWARDS, METHODS

QUICK_CASES = [case for case in catalogue.cases(QUICK) if case.definition.family != "transfer"]
COUNTED = [case for case in QUICK_CASES if case.mode == "forward" and case.definition.name in (
    "matmul", "attention-scores", "convolution", "attention",
    "mlp", "resnet50", "vit", "gpt2", "bert", "dlrm")]  # fmt: skip


def test_names_are_unique_and_found_again():
    every = {(case.name, tuple(case.sizes.items())) for scale in (QUICK, FULL) for case in catalogue.cases(scale)}
    names = [name for name, _ in every]
    assert len(names) == len(set(names)) > 60
    assert all(catalogue.find(name).name == name for name in names)


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_operations_are_those_that_torch_counts(case):
    built = build(case, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        built.module.eval()(*built.sample.args)
    counted, causal = counter.get_total_flops(), case.name.startswith("attention/prefill")
    assert case.flops == pytest.approx(counted / 2 if causal else counted, rel=0.01)


@pytest.mark.parametrize("case", QUICK_CASES, ids=lambda case: case.name)
def test_every_case_moves_bytes_and_is_built_alike_from_one_seed(case):
    assert case.bytes(4) > 0 and case.bytes(2) <= case.bytes(4) and case.items >= 1
    one, again = build(case, 7), build(case, 7)
    assert all(torch.equal(a, b) for a, b in zip(one.sample.args, again.sample.args, strict=True))
    state = again.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.module.state_dict().items())


@pytest.mark.parametrize(
    ("patterns", "some", "count"),
    [
        (["matmul"], "matmul/256x256x256", 3),
        (["*/train/*"], "mlp/train/b64-d256", 6),
        (["gpt2/forward"], "gpt2/forward/decode-b4-s256", 2),
        (["smoke", "mlp"], "memory-copy/64MiB", 9),
        (["all"], "all-reduce/4MiB-2ranks", 38),
        (["kernels"], "weighted-sum/2048x2048", 15),
        (["backward"], "attention/backward/prefill-b1-h8-s256-d64", 11),
        (["softmax", "rope/backward"], "rope/backward/b1-h8-t512-d64", 2),
        (["*/backward/256x4096"], "rmsnorm/backward/256x4096", 5),
    ],
)
def test_cases_are_chosen_by_suite_workload_name_and_pattern(patterns, some, count):
    chosen = [case.name for case in catalogue.choose(patterns)]
    assert some in chosen and len(chosen) == count


def test_the_suite_of_kernels_is_what_they_implement():
    assert set(KERNEL_OPERATIONS) == set(METHODS)
    assert {case.definition.name for case in catalogue.choose(["backward"])} == set(BACKWARDS)


@pytest.mark.parametrize("case", catalogue.choose(["backward"]), ids=lambda case: case.name)
def test_gradients_read_and_write_what_their_formula_says(case):
    built = build(case, 0)
    grad, *inputs = built.sample.args
    learned = inputs[: len(inputs) - built.module.tables]
    moved = sum(t.nbytes for t in learned) + grad.nbytes + 4 * len(built.module(grad, *inputs))
    moved += grad.nbytes if case.definition.name == "attention" else 0  # its result is read, too
    moved -= grad.nbytes if case.definition.name == "rope" else 0  # its input is not
    assert case.bytes(4) == pytest.approx(moved, rel=0.01)


def test_grouped_queries_share_keys_and_move_fewer_bytes():
    attention = catalogue.DEFINITIONS["attention"]
    sizes = {"b": 1, "h": 4, "t": 8, "s": 8, "d": 16}
    plain, grouped = (Case(attention, sizes | more) for more in ({}, {"g": 2}))
    built = build(grouped, 0)
    assert built.module(*built.sample.args).shape == built.sample.args[0].shape == (1, 4, 8, 16)
    assert grouped.name == "attention/prefill-b1-h4-g2-s8-d16" and grouped.flops == plain.flops
    assert grouped.bytes(4) == sum(t.nbytes for t in built.sample.args) + 4 * 4 * 8 * 16 < plain.bytes(4)


def test_what_means_nothing_names_the_nearest():
    with pytest.raises(NotFound, match="no case or suite 'matmull'; did you mean 'matmul'"):
        catalogue.choose(["mlp", "matmull"])
    with pytest.raises(NotFound, match="mlp/train/b64-d256"):
        catalogue.find("mlp/train/b64-d265")
