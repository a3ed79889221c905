from orchestrator.runtime.reservations import fits

FREE = {"a": {"CPU": 2.0, "GPU": 1.0}, "b": {"CPU": 0.5}}


def test_bundles_fit_where_every_node_has_room_for_their_sum():
    assert fits([{"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 0.5}], ["a", "a", "b"], FREE)
    assert not fits([{"CPU": 1.5}, {"CPU": 1.0}], ["a", "a"], FREE)


def test_a_resource_or_a_node_that_is_not_there_has_no_room():
    assert not fits([{"TPU": 1.0}], ["a"], FREE)
    assert not fits([{"CPU": 0.1}], ["gone"], FREE)


def test_shares_that_ray_rounds_still_fit():
    assert fits([{"CPU": 2 / 3}], ["a"], {"a": {"CPU": 0.6667}})
    assert fits([{"CPU": 2 / 3}], ["a"], {"a": {"CPU": 0.6666}})
