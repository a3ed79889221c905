import pickle

import pytest

from orchestrator.core.states import ACTIVE, EVENTS, MEANING, MOVES, TERMINAL, WAITING, InvalidMove, State, move


def test_every_state_is_waiting_active_or_terminal_and_has_a_meaning():
    assert set(State) == WAITING | ACTIVE | TERMINAL == set(MEANING)
    assert len(WAITING) + len(ACTIVE) + len(TERMINAL) == len(State)


def test_nothing_leaves_a_terminal_state():
    assert not [line for line in MOVES if line[0] in TERMINAL]


def test_every_state_can_be_reached_and_every_other_can_be_cancelled():
    reached = {State.PENDING} | set(MOVES.values())
    assert reached == set(State)
    assert all(move(state, "cancelled") is State.CANCELLED for state in set(State) - TERMINAL)


def test_every_state_that_is_not_terminal_leads_to_each_end():
    reachable = {state: {state} for state in State}
    for _ in State:
        for (state, _event), after in MOVES.items():
            reachable[state] |= reachable[after]
    assert all(reachable[state] >= TERMINAL for state in set(State) - TERMINAL)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_what_is_not_in_the_table_cannot_happen(state):
    for event in EVENTS:
        with pytest.raises(InvalidMove, match=f"a job in {state} has no move for event '{event}'") as raised:
            move(state, event)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
