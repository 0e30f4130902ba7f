"""The files of deploy/ can be parsed, say the same thing, and their commands really train on this machine."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rowhaul._ports import free_port
from rowhaul.checkpoint import latest_checkpoint
from rowhaul.train.run_folder import CHECKPOINTS

DEPLOY = Path(__file__).parents[2] / "deploy"
SMALL = ["--max-steps", "4", "--batch-size", "256", "--embedding-dim", "4", "--set", "model.options.top=[16]"]
SECRET = "0123456789abcdef" * 2
OF_TORCHRUN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds; by default it kills its ranks after 30


def load(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def compose_commands():
    (compose,) = load("compose.yaml")
    return [["torchrun", *shlex.split(one["command"])] for one in compose["services"].values()]


def job_commands():
    service, job = load("kubernetes/job.yaml")
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (text,) = container["args"]
    return [
        shlex.split(text.replace("exec ", "").replace("$JOB_COMPLETION_INDEX", str(rank)))
        for rank in range(job["spec"]["completions"])
    ]


def torchjob():
    (job,) = load("kubernetes/pytorchjob.yaml")
    return job["spec"]["pytorchReplicaSpecs"]


def test_all_of_them_start_three_ranks_with_the_same_arguments():
    (container,) = torchjob()["Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # which the operator looks for
    assert sum(one["replicas"] for one in torchjob().values()) == 3
    assert torchjob()["Master"]["template"] == torchjob()["Worker"]["template"]
    trained = ["train", *container["args"]]
    for commands in (compose_commands(), job_commands()):
        assert len(commands) == 3
        for rank, command in enumerate(commands):
            assert command[command.index("--node-rank") + 1] == str(rank)
            assert command[command.index("rowhaul") + 1 :] == trained


def test_ranks_get_time_to_save_and_a_secret():
    (compose,) = load("compose.yaml")
    for one in compose["services"].values():
        assert one["stop_grace_period"] == "5m"
        assert "ROWHAUL_SECRET" in one["environment"]
        assert one["environment"][OF_TORCHRUN] == 300
    pods = [
        load("kubernetes/job.yaml")[1]["spec"]["template"]["spec"],
        torchjob()["Master"]["template"]["spec"],
    ]
    for pod, by_torchrun in zip(pods, (True, False), strict=True):
        assert pod["terminationGracePeriodSeconds"] == 300
        names = [one["name"] for one in pod["containers"][0]["env"]]
        assert names == ["ROWHAUL_SECRET"] + by_torchrun * [OF_TORCHRUN]
    assert pods[0]["containers"][0]["env"][1]["value"] == "300"
    script = (DEPLOY / "slurm.sh").read_text()
    assert "--signal=TERM@300" in script
    assert f"export {OF_TORCHRUN}=300" in script


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_images_are_built_from_files_that_there_are(name):
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "ENV"}
    assert {word for word, _ in steps} <= known
    assert steps[0][0] == "FROM"
    copied = [rest.split()[0] for word, rest in steps if word == "COPY"]
    assert copied == ["constraints.txt", "dist/*.whl"]
    assert ["USER", "rowhaul"] in steps  # not root
    extras = re.search(r"\[([\w,]+)\]\"", text)[1].split(",")
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{one} = \[", project, re.MULTILINE) for one in extras)


def run_all(commands, variables, folder, log_folder):
    """Run commands side by side, with paths and names of a cluster replaced by local ones."""
    local = {"/data": str(log_folder), "/run/rowhaul": str(folder / "run")}
    port = str(free_port())
    children = []
    for command, more in zip(commands, variables, strict=True):
        words = [local.get(word, word) for word in command]
        words = [re.sub(r"^(rank0|rowhaul-0\.rowhaul)$", "127.0.0.1", word) for word in words]
        words = [port if word == "29500" else word for word in words]
        program = {"torchrun": Path(sys.executable).parent / "torchrun", "python": sys.executable}[words[0]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROWHAUL_SECRET": SECRET, **more}
        if "MASTER_PORT" in more:
            environment["MASTER_PORT"] = port
        children.append(
            subprocess.Popen(
                [program, *words[1:], *SMALL],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [child.communicate(timeout=280)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], "\n".join(outputs)
    assert latest_checkpoint(folder / "run" / CHECKPOINTS) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compose", "job", "pytorchjob"])
def test_the_commands_train(kind, tmp_path, log_folder):
    if kind == "pytorchjob":
        (container,) = torchjob()["Master"]["template"]["spec"]["containers"]
        commands = [[*container["command"], *container["args"]]] * 3
        shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ""}
        variables = [{**shared, "RANK": str(rank)} for rank in range(3)]
    else:
        commands, variables = (compose_commands() if kind == "compose" else job_commands()), [{}] * 3
    run_all(commands, variables, tmp_path, log_folder)


@pytest.mark.slow
def test_the_slurm_script_trains(tmp_path, log_folder):
    programs = {
        "scontrol": "#!/bin/sh\nprintf '127.0.0.1\\nother\\nthird\\n'\n",
        "srun": '#!/bin/bash\nshift\nfor i in 0 1 2; do SLURM_NODEID=$i "$@" & pids+=($!); done\n'
        'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    script = (DEPLOY / "slurm.sh").read_text().replace("29500", str(free_port()))
    (tmp_path / "job.sh").write_text(script)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"PATH": path, "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "any", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", tmp_path / "job.sh", log_folder, tmp_path / "run", *SMALL],
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert latest_checkpoint(tmp_path / "run" / CHECKPOINTS) is not None
