from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.plan.arrays.numbers import FreeNumbers


def test_the_tightest_node_is_taken_so_that_whole_nodes_stay_whole():
    free = FreeNumbers([(0, 1, 2, 3), (1, 3), (0, 1, 2, 3)])
    assert free.allocate(1) == (1, (1,))
    assert free.allocate(1) == (1, (3,))
    assert free.allocate(4) == (0, (0, 1, 2, 3))
    assert free.allocate(4) == (2, (0, 1, 2, 3))
    assert free.allocate(1) is None


def test_nothing_is_taken_of_a_node_that_is_withdrawn_until_it_is_given_back():
    free = FreeNumbers([(0, 1), (0, 1, 2)])
    assert free.withdraw(0) == (0, 1)
    assert free.allocate(2) == (1, (0, 1))
    assert free.allocate(2) is None
    free.release(0, (0, 1))
    assert free.allocate(2) == (0, (0, 1))


def test_the_largest_gangs_are_placed_first_and_who_finds_no_node_is_told():
    placed, left = FreeNumbers([(0, 1, 2, 3), (0, 1)]).place({"small": 1, "gang": 4, "pair": 2, "late": 2})
    assert placed == {"gang": (0, (0, 1, 2, 3)), "late": (1, (0, 1))}
    assert left == ["pair", "small"]


@given(st.lists(st.integers(0, 8), max_size=8), st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=30))
def test_devices_are_held_once_and_come_back_and_deltas_are_as_a_fresh_build(sizes, steps):
    free = FreeNumbers([tuple(range(size)) for size in sizes])
    held = []
    for count, ends in steps:
        if ends and held:
            free.release(*held.pop(0))
        elif (found := free.allocate(count)) is not None:
            held.append(found)
            assert len(found[1]) == count
    used = [(node, number) for node, numbers in held for number in numbers]
    assert len(set(used)) == len(used)
    assert free.count + len(used) == sum(sizes)
    rest = [tuple(n for n in range(size) if (node, n) not in used) for node, size in enumerate(sizes)]
    fresh = FreeNumbers(rest)
    for count in (8, 4, 2, 1, 1):
        assert free.allocate(count) == fresh.allocate(count)
