"""Each test draws the same random numbers in every run, and others with another seed."""

import random

import numpy
import pytest
import schedule
import torch
from draws import Draws


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


@pytest.fixture
def first():
    return drawn()


def test_a_failure_that_depends_on_random_numbers_repeats(request, monkeypatch, first):
    monkeypatch.delenv(schedule.SEED, raising=False)
    Draws().pytest_runtest_setup(request.node)
    alone = drawn()
    monkeypatch.setenv(schedule.SEED, "1")
    Draws().pytest_runtest_setup(request.node)
    assert not set(alone) & set(drawn())


def test_tests_draw_before_their_fixtures(request, first):
    Draws().pytest_runtest_setup(request.node)
    assert first == drawn()
