"""What is told of a node that did not start."""

from cluster.nodes.raylets import log_tail


def test_the_last_words_of_a_node_are_not_what_ray_prints_around_them(tmp_path):
    log = tmp_path / "raylet.log"
    around = "    [state-dump] \tmean = 0.00ms\n\n2026 ERR -- ----- END raylet.out tail\n"
    log.write_text(f"first\n[main.cc] (raylet) Check failed: no port\n{around}")
    assert log_tail(log, 1) == "[main.cc] (raylet) Check failed: no port"
    log.write_text("[state-dump]\n\n")
    assert log_tail(log) == "it printed nothing"
    assert "No such file" in log_tail(tmp_path / "absent")
