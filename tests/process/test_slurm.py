"""Two tasks of a Slurm job on one machine: warned before its time ends, the job saves, requeues itself, continues."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import own_folder

ROOT = Path(__file__).parents[2]
CLUSTER = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes={host} Default=YES
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Debian's slurm-wlm"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands know a cluster of this machine alone, without credentials."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    controller, node = free_port(), free_port()
    conf = folder / "slurm.conf"
    conf.write_text(
        CLUSTER.format(
            host=host, user=os.environ.get("USER", "root"), folder=folder, controller_port=controller, node_port=node
        )
    )
    known = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{ROOT / '.venv/bin'}:/usr/sbin:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        started = [
            subprocess.Popen([name, "-D", "-f", str(conf)], env=known, stdout=log, stderr=log)
            for name in ("slurmctld", "slurmd")
        ]
    try:
        until(lambda: "idle" in slurm(known, "sinfo", "--noheader"), 60, lambda: (folder / "log").read_text())
        yield known
    finally:
        for process in started:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def slurm(known: dict[str, str], *command: str, folder: Path | None = None) -> str:
    """The output of one of Slurm's commands."""
    return subprocess.run(command, env=known, cwd=folder, capture_output=True, text=True, timeout=300).stdout


def until(holds: Callable[[], bool], seconds: float, found: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, found()
        time.sleep(0.5)


def documented(page: Path) -> str:
    """The job script of a page, for two tasks on one machine without GPUs."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    options = "#SBATCH --nodes=1 --ntasks-per-node=2 --requeue --open-mode=append --output=job.log\n"
    kept = "".join(line for line in script.splitlines(keepends=True) if not line.startswith("#SBATCH"))
    assert "--trainer.num_nodes 2 --trainer.devices 8" in kept
    kept = kept.replace("--trainer.num_nodes 2 --trainer.devices 8", "--trainer.num_nodes 1 --trainer.devices 2")
    return kept.replace("#!/bin/bash\n", "#!/bin/bash\n" + options)


def test_a_job_that_is_warned_saves_requeues_itself_and_continues(tmp_path: Path, cluster: dict[str, str]) -> None:
    own_folder.make(tmp_path)
    own_folder.write(tmp_path / "my.yaml", {**own_folder.TWO_RANKS, "trainer.max_steps": 40})
    (tmp_path / "job.sh").write_text(documented(ROOT / "docs" / "reliability.md"))
    job = slurm(cluster, "sbatch", "--parsable", "job.sh", folder=tmp_path).strip()
    log = tmp_path / "job.log"

    def printed(text: str) -> Callable[[], bool]:
        return lambda: log.exists() and text in log.read_text()

    def shown() -> str:
        return slurm(cluster, "scontrol", "show", "job", job)

    def found() -> str:
        return log.read_text() + shown()

    def has_completed() -> bool:
        state = shown()
        if "JobState=PENDING" in state:  # Slurm would wait for two minutes, and may say so again
            slurm(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")
        return "JobState=COMPLETED" in state

    until(printed("step 2/40"), 300, log.read_text)
    slurm(cluster, "scancel", "--signal=USR1", job)
    until(lambda: "JobState=PENDING" in shown(), 120, found)
    assert printed("rlflow: ended by SIGUSR1: runs/own/checkpoint/step-")()
    time.sleep(3)  # slurmd refuses a job that starts within the second in which it was killed
    until(has_completed, 300, found)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 41)]  # of both attempts, none twice
    assert log.read_text().count("step 1/40") == 1
