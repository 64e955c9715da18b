"""`wholestep run`: places given out, output marked, one failure ends all, the exit code told."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wholestep import launcher
from wholestep.cli import main

HANG = "import time\ntime.sleep(600)\n"


def command_line(arguments: list[str], environment: dict[str, str], streams: list[Path]) -> None:
    """`wholestep ARGUMENTS` in a process that has imported torch: an interpreter of its own would take seconds more."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    main(arguments)


@pytest.fixture
def run(tmp_path: Path):
    """Writes a script and runs it under `wholestep run` with the given options."""

    def start(script: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        path, streams = tmp_path / "script.py", [tmp_path / "stdout", tmp_path / "stderr"]
        path.write_text(script)
        command = ["run", *options, str(path), *arguments]
        # some builds of torch tell each process what they lack; the ranks find the package where this process does
        environment = os.environ | {"TORCH_LOGS": "-torch", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        make = multiprocessing.get_context("forkserver").Process
        process = make(target=command_line, args=(command, environment, streams))
        process.start()
        process.join(60)
        assert process.exitcode is not None, "it has not ended"
        return subprocess.CompletedProcess(command, process.exitcode, *(stream.read_text() for stream in streams))

    return start


def alive(pid: int) -> bool:
    """True for a process that runs (a zombie that nobody reaps has ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, patience: float = 10.0) -> bool:
    deadline = time.monotonic() + patience
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_each_rank_learns_its_place(run):
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    out = run(f"import os\nprint(*(os.environ[k] for k in {keys}), int(os.environ['MASTER_PORT']) > 0)", "-n", "3")
    assert out.returncode == 0, out.stderr
    assert sorted(out.stdout.splitlines()) == [f"[rank {r}] {r} {r} 3 3 0 127.0.0.1 True" for r in range(3)]


def test_ranks_count_on_over_several_hosts(run, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_SECRET", "told beforehand")
    options = ("-n", "2", "--nodes", "2", "--node-rank", "1", "--master-port", "29400", "--master-addr", "10.0.0.7")
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "WHOLESTEP_SECRET"]
    out = run(f"import os\nprint(*(os.environ[k] for k in {keys}))", *options)
    shared = "4 1 10.0.0.7 29400 told beforehand"
    assert sorted(out.stdout.splitlines()) == [f"[rank {r}] {r} {r - 2} {shared}" for r in (2, 3)]


MEETING = """
import os, pathlib
from wholestep import comm
comm.init_process_group()
peers = [None] * 2
comm.all_gather_object(peers, os.environ["WHOLESTEP_SECRET"])
command = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode()
print(peers[0] == peers[1], len(peers[0]), peers[0] in command)
try:
    os.environ["WHOLESTEP_SECRET"] = "guessed"
    comm.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
except comm.DistNetworkError as refusal:
    print("refused this rank" in str(refusal))
comm.barrier()
"""


def test_the_ranks_share_a_secret_of_this_run(run, monkeypatch):
    monkeypatch.delenv("WHOLESTEP_SECRET", raising=False)
    out = run(MEETING, "-n", "2")
    said = ("True", "True 64 False")
    assert sorted(out.stdout.splitlines()) == [f"[rank {r}] {line}" for r in (0, 1) for line in said]


BOTH = """
import torch
import torch.distributed as dist
from wholestep import comm
from wholestep.comm.stores import tcp_store
tcp_store.SILENCE = 1.0
dist.init_process_group("gloo")
try:
    comm.init_process_group(init_method="env://")
except comm.DistNetworkError as taken:
    print("torch.distributed's own process group? Choose a free one" in str(taken))
comm.init_process_group()  # over the group's own store
number = torch.tensor(comm.get_rank() + 1)
comm.all_reduce(number)
dist.all_reduce(number)
print(int(number), comm.get_backend())
comm.destroy_process_group()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_port_that_torch_distributed_has_is_told_on_every_rank_and_its_store_is_used(run):
    out = run(BOTH, "-n", "2")
    said = ("6 shm", "True")
    assert sorted(out.stdout.splitlines()) == [f"[rank {rank}] {line}" for rank in (0, 1) for line in said]


FORGETFUL = """
import os, sys, torch, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
from wholestep import comm
comm.init_process_group("{0}")
comm.all_reduce(torch.ones(4))
comm.barrier()
if os.fork() == 0:
    sys.exit()
os.wait()
comm.barrier()
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_program_may_end_without_destroying_its_groups(run, backend):
    """Nor does the end of a process that it forked end them."""
    out = run(FORGETFUL.format(backend), "-n", "2")
    assert (out.returncode, out.stderr) == (0, "")


def test_arguments_reach_the_script_as_they_are(run):
    out = run("import sys\nprint(sys.argv[1:])", "-n", "1", arguments=("-n", "7", "--", "--help", "a b"))
    assert out.stdout == "[rank 0] ['-n', '7', '--', '--help', 'a b']\n"


def test_streams_stay_apart_and_every_line_is_marked(run):
    out = run("import sys\nprint('one\\ntwo')\nprint('bad', file=sys.stderr, end='')", "-n", "1")
    assert out.stdout == "[rank 0] one\n[rank 0] two\n"
    assert out.stderr == "[rank 0] bad\n"


def test_one_failure_ends_all_with_its_exit_code(run):
    script = f"import os, sys\nprint(os.getpid())\nif os.environ['RANK'] == '1': sys.exit(7)\n{HANG}"
    out = run(script, "-n", "3")
    assert out.returncode == 7
    assert "rank 1 (process" in out.stderr and "exit code 7; stopping the 2 that still ran" in out.stderr
    assert all(not alive(int(line.split()[-1])) for line in out.stdout.splitlines())


def test_a_killed_rank_is_named_with_its_signal(run):
    script = f"import os, signal\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n{HANG}"
    out = run(script, "-n", "2")
    assert out.returncode == 128 + signal.SIGKILL
    assert "killed by SIGKILL" in out.stderr


def test_nobody_who_reads_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text("while True:\n    print('x' * 1000)")
    command = [sys.executable, "-m", "wholestep", "run", "-n", "2", str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("[rank ")
        process.stdout.close()
        assert process.stderr.read().splitlines()[:1] == ["wholestep run: stopped by SIGPIPE"]
        assert process.wait(30) == 128 + signal.SIGPIPE


def test_what_a_rank_started_ends_with_it(run):
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    out = run(f"import subprocess, sys\nprint({sleeper}.pid)\nsys.exit(3)", "-n", "1")
    assert out.returncode == 3
    assert gone(int(out.stdout.split()[-1]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals):
    (tmp_path / "script.py").write_text(f"import os\nprint(os.getpid(), flush=True)\n{HANG}")
    command = [sys.executable, "-m", "wholestep", "run", "-n", "2", str(tmp_path / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        assert all(alive(pid) for pid in ranks)
        os.kill(launcher.pid, number)
        try:
            code = launcher.wait(30)
        finally:
            launcher.kill()
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert all(gone(pid) for pid in ranks)


def test_a_signal_that_wakes_nobody_is_heeded():
    """As one does that comes right before the launcher begins to wait: here another thread is given it."""
    events: Any = queue.SimpleQueue()
    before = signal.signal(signal.SIGUSR1, lambda number, _: events.put((None, -number)))

    def send() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)
        events.put((None, -signal.SIGKILL))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        assert launcher._watch([None], events) == (128 + signal.SIGUSR1, False)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "at least one rank"),
        (["--nodes", "2", "--node-rank", "2", "--master-port", "1"], "host 2 is not one of 0..1"),
        (["--nodes", "2"], "give the port"),
        (["--nodes", "2", "--master-port", "1"], "set WHOLESTEP_SECRET alike on each"),
        (["-n", "two"], "not a valid integer"),
    ],
)
def test_wrong_numbers_are_explained(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WHOLESTEP_SECRET", raising=False)
    result = CliRunner().invoke(main, ["run", *options, "script.py"])
    assert result.exit_code == 2
    assert message in result.output
