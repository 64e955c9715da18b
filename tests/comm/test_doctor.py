"""Flight records, and what `wholestep doctor` says of them."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from wholestep import comm
from wholestep.cli import main
from wholestep.testing import run_ranks


def doctor(*paths):
    return CliRunner().invoke(main, ["doctor", *map(str, paths)])


def record_and_dump(folder):
    comm.all_reduce(torch.ones(3))
    comm.barrier()
    path = comm.dump(comm.get_rank(), f"{folder}/{comm.get_rank()}.json")
    assert path.stat().st_mode & 0o777 == 0o600
    return str(path)


def test_records_of_ranks_that_wait_for_each_other(tmp_path):
    paths = run_ranks(record_and_dump, 2, "gloo", (str(tmp_path),))
    assert comm.diagnose(paths) == "All collectives of ranks [0, 1] completed."
    for rank, change in ((0, {"seq": 9, "op": "all_reduce"}), (1, {"seq": 8, "op": "barrier"})):
        content = json.loads(Path(paths[rank]).read_text())
        content["collectives"] = [c | change | {"state": "started"} for c in content["collectives"][:1]]
        Path(paths[rank]).write_text(json.dumps(content))
    sentence = comm.diagnose(paths)
    assert "rank(s) 0 wait in #9 all_reduce of float32 [3]" in sentence
    assert "rank 1 stopped after #8 barrier" in sentence
    assert comm.diagnose([tmp_path]) == sentence
    assert "others that did not come: rank 1 left no record" in comm.diagnose(paths[:1])
    later = json.loads(Path(paths[0]).read_text())
    later["written"], later["collectives"][0]["state"] = later["written"] + 1, "completed"
    (tmp_path / "later.json").write_text(json.dumps(later))
    assert "rank 1 stopped after #8" in comm.diagnose([tmp_path])


def record(folder, rank, op, started, state="failed", error=""):
    call = {"number": 1, "group": "world", "seq": 6, "op": op, "shape": [4], "dtype": "float32", "where": "train.py:3"}
    call |= {"started": started, "state": state, "error": error}
    about = {"rank": rank, "pid": 1, "written": 9.0, "groups": {"world": [0, 1, 2]}}
    (folder / f"rank{rank}.json").write_text(json.dumps(about | {"collectives": [call]}))


def test_a_rank_that_comes_late_and_a_message_that_does_not_come(tmp_path):
    for rank in range(3):
        record(tmp_path, rank, "all_reduce", 100.0 + 5 * (rank == 1), error="rank 0 waited" if rank == 0 else "")
    said = comm.diagnose([tmp_path])
    assert "where all have come, rank 1 5.0 s after rank 0. rank 0 waited" in said
    record(tmp_path, 0, "recv", 100.0, error="recv from rank 1 did not end")
    only = comm.diagnose([tmp_path / "rank0.json"])
    assert only == "Rank 0 waits in recv of float32 [4] at train.py:3. recv from rank 1 did not end"


def test_what_is_no_record(tmp_path):
    (tmp_path / "junk").write_text("{}")
    with pytest.raises(ValueError, match="is not a flight record"):
        comm.diagnose([tmp_path / "junk"])
    with pytest.raises(ValueError, match="at least one"):
        comm.diagnose([])
    for paths, words in (([tmp_path / "junk"], "is not a flight record"), ([tmp_path], "at least one"), ([], "DUMPS")):
        result = doctor(*paths)
        assert result.exit_code == 2
        assert words in result.output


def in_two_groups(folder):
    """Each rank waits for the other in a group of its own."""
    os.environ["WHOLESTEP_DUMP"] = folder
    first, second = (comm.new_group([1, 2], timeout=timedelta(seconds=1)) for _ in range(2))
    if comm.get_rank() == 1:
        with pytest.raises(comm.DistTimeoutError, match="rank 1 waited 1 s"):
            comm.all_reduce(torch.ones(4), group=first)
    if comm.get_rank() == 2:
        with pytest.raises(comm.DistTimeoutError, match="rank 2 waited 1 s"):
            comm.barrier(group=second)


def test_a_deadlock_over_two_groups_in_one_sentence(tmp_path):
    run_ranks(in_two_groups, 3, "shm", (str(tmp_path),))
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["rank1", "rank2"]
    result = doctor(tmp_path)
    assert result.exit_code == 0
    reduces = "wait in #1 all_reduce of float32 [4] at "
    waits = "wait in #1 barrier at "
    if "rank(s) 1 " + reduces in result.output:
        other = "rank 2 has called nothing and waits in #1 barrier at "
        assert "In group 'group.0'" in result.output and "of group 'group.1'" in result.output
    else:
        assert "rank(s) 2 " + waits in result.output
        other = "rank 1 has called nothing and waits in #1 all_reduce of float32 [4] at "
    assert other in result.output
    assert "test_doctor.py:" in result.output


def with_another_length(folder):
    os.environ["WHOLESTEP_DUMP"] = folder
    with pytest.raises(comm.DistMismatchError):
        comm.all_reduce(torch.ones(3 + comm.get_rank()))


def test_a_disagreement_in_one_sentence(tmp_path):
    run_ranks(with_another_length, 2, "shm", (str(tmp_path),))
    said = doctor(*tmp_path.iterdir()).output
    assert "Group 'world' does not agree on collective #1: rank 0 calls all_reduce of float32 [3] at " in said
    assert "rank 1 calls all_reduce of float32 [4] at " in said
