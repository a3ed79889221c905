"""A store that speaks S3 over HTTP."""

from workers.checkpoint.transfer.copier import copy, verify_location


def test_there_and_back_over_http(bucket, tmp_path, checkpoint_of_40_mib):
    source = checkpoint_of_40_mib
    assert copy(source, bucket)["transferred_bytes"] > 40 << 20
    assert copy(source, bucket)["already_there"]
    assert verify_location(bucket)["ok"]
    back = copy(bucket, tmp_path / "back")
    assert back["transferred_bytes"] == back["bytes"]
    for path in source.iterdir():
        assert path.read_bytes() == (tmp_path / "back" / source.name / path.name).read_bytes()
