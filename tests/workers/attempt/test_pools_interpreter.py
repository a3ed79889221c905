"""What an attempt starts where its pool has another Python than its agent."""


def test_tasks_of_ours_and_python_on_the_path_are_of_the_pools_interpreter(node, rayless, monkeypatch):
    monkeypatch.setenv("POLYFLEET_INTERPRETER", str(rayless))
    node.train("import sys\ndef train(ctx):\n    return {'python': sys.executable}\n")
    assert node.outcome()["result"]["returned"] == {"python": str(rayless)}, node.text()
    node.start("k", ("sh", "-c", "command -v python"))
    node.outcome("k")
    assert node.text("k") == [f"out {rayless}"]
