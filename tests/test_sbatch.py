"""The job scripts for Slurm, with stand-ins for what a cluster has: a warned run queues itself again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "recipes" / "slurm"

SRUN = """#!/bin/bash
echo "$@" > {folder}/srun
trap 'echo warned >> {folder}/srun; sleep 0.2; exit {stopped}' USR1
touch {folder}/ready
for _ in $(seq {tenths}); do sleep 0.1; done
exit {finished}
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$@" > {folder}/scontrol; fi
"""
TORCHRUN = """#!/bin/bash
echo "--signals-to-handle --shutdown-timeout"
"""


def run(folder: Path, warn=False, finished=0, stopped=1, tenths=1, script="train", **given: str):
    """The script's exit code, what srun was called with and heard, what scontrol was asked."""
    values = {"folder": folder, "finished": finished, "stopped": stopped, "tenths": tenths}
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN}.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text.format(**values))
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    env = os.environ | slurm | {"SLURM_GPUS_ON_NODE": "4", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | given
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    job = subprocess.Popen(["bash", SCRIPTS / f"{script}.sbatch", "mine.yaml", "--run", "a b"], cwd=folder, env=env)
    if warn:
        while not (folder / "ready").exists():
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
    code = job.wait(60)
    asked = folder / "scontrol"
    return code, (folder / "srun").read_text(), asked.read_text() if asked.exists() else ""


def test_a_warned_job_passes_it_on_waits_and_queues_itself_again(tmp_path):
    code, srun, scontrol = run(tmp_path, warn=True, tenths=300)
    assert code == 1 and srun.endswith("warned\n")
    assert scontrol == "requeue 4711\n"


@pytest.mark.parametrize(("warn", "finished", "stopped"), [(False, 0, 1), (False, 1, 1), (True, 0, 0)])
def test_a_job_that_ends_by_itself_is_not_queued_again(tmp_path, warn, finished, stopped):
    code, _, scontrol = run(tmp_path, warn, finished, stopped, tenths=300 if warn else 1)
    assert code == (stopped if warn else finished)
    assert scontrol == ""


def test_all_nodes_meet_at_the_first(tmp_path):
    _, srun, _ = run(tmp_path)
    assert "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node7:24711 " in srun
    assert srun.splitlines()[0].endswith("-m -- tandem train mine.yaml --run a b")


@pytest.mark.parametrize("script", ["train", "compare"])
def test_a_step_asks_for_the_cores_of_its_job(tmp_path, script):
    _, srun, _ = run(tmp_path, script=script, SLURM_CPUS_PER_TASK="6")
    assert "--cpus-per-task=6 t" in srun
