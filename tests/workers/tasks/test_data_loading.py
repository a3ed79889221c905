import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from workers.devices import backends
from workers.tasks.data_loading import DeviceLoader, shard_items

CPU = backends.create("cpu")


def numbers(loader):
    return [[int(n) for n in batch[0]] for batch in loader]


def both(loader, seed=3):
    return [DeviceLoader(loader, CPU, rank, 2, seed) for rank in range(2)]


def test_one_rank_sees_the_loader_as_it_is():
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    mine = DeviceLoader(loader, CPU, 0, 1, 0)
    assert numbers(mine) == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(mine) == 4
    assert mine.batch_size == 2
    assert mine.dataset is loader.dataset


def test_two_ranks_take_turns_and_leave_out_the_last_incomplete_round():
    a, b = both(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
    assert (numbers(a), numbers(b)) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert len(a) == len(b) == 2


def test_a_shuffle_is_the_same_on_all_ranks_whatever_their_own_random_state_and_new_in_every_epoch():
    loaders = both(DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True))
    epochs = []
    for _ in range(2):
        parts = []
        for loader in loaders:
            torch.rand(len(parts) + 1)
            parts.append(numbers(loader))
        epochs.append(parts)
        assert sorted(n for part in parts for batch in part for n in batch) == list(range(12))
    assert epochs[0] != epochs[1]


def test_a_sampler_that_already_knows_of_ranks_is_left_alone():
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=False))
    assert numbers(DeviceLoader(loader, CPU, 1, 2, 0)) == [[1, 3], [5, 7]]


def test_any_iterable_of_batches_is_shared_too():
    a, b = both([(torch.tensor([i]),) for i in range(5)])
    assert (numbers(a), numbers(b)) == ([[0], [2]], [[1], [3]])


def test_sharing_takes_whole_rounds_only():
    assert list(shard_items(range(8), 1, 3)) == [1, 4]


def test_what_a_loader_lacks_its_wrapper_lacks():
    with pytest.raises(AttributeError):
        DeviceLoader([1], CPU, 0, 1, 0).dataset  # noqa: B018
