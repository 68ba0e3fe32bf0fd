"""`stoker check --job`: batch scripts of Slurm and manifests of Kubernetes, each with the change that puts it right."""

import re
from pathlib import Path

import pytest

from stoker.preflight.static import check_sources
from stoker_watch.findings.finding import Finding

SLURM = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=a100:4   # each
#SBATCH -c 8
#SBATCH --mem=64G
#SBATCH --time=10:00 --signal=B:USR1@120

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
cat <<EOF > notes
#SBATCH --nodes=9
python this_is_no_command.py
EOF
srun --kill-on-bad-exit=1 \\
    python -u train.py --workers 6
"""
FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
SRUN = "srun --kill-on-bad-exit=1 \\\n"
TORCHRUN = SLURM.replace("node=4\n", "node=1\n", 1).replace("python -u", "torchrun --nnodes=2 --nproc_per_node=4")
ONE_NODE = SLURM.replace("nodes=2", "nodes=1", 1)
JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  completionMode: Indexed
  parallelism: 2
  backoffLimit: 3
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: trainer
        image: registry/pytorch:2
        command: ["torchrun", "--nnodes=2", "--nproc_per_node=4"]
        args: ["train.py", "--workers=6"]
        env:
        - {name: WORLD_SIZE, value: "8"}
        - {name: MASTER_ADDR, value: train-0.train}
        resources:
          requests: {memory: 32Gi}
          limits:
            nvidia.com/gpu: 4
            memory: 64Gi
        volumeMounts:
        - {name: shm, mountPath: /dev/shm/}
      volumes:
      - name: shm
        emptyDir:
          medium: Memory
          sizeLimit: 8Gi
"""
COMMAND = '["torchrun", "--nnodes=2", "--nproc_per_node=4"]'
POD = """\
apiVersion: v1
kind: Pod
spec:
  restartPolicy: Never
  containers:
  - {name: a, image: x, command: [sh, -c, "python train.py --lr 1"]}
"""


def check(folder: Path, text: str, script: str | None = None) -> list[Finding]:
    path, program = folder / "job", folder / "train.py"
    path.write_text(text)
    if script is not None:
        program.write_text(script)
    given = None if script is None else program
    found = check_sources(dockerfile=None, requirements=None, script=given, job=path)
    return [finding for finding in found if not finding.place.startswith(str(program))]


def facts(findings: list[Finding]) -> list[tuple[str, str, int]]:
    return [(found.severity, found.id, int(found.place.rpartition(":")[2])) for found in findings]


@pytest.mark.parametrize("text", [SLURM, TORCHRUN, ONE_NODE, JOB, POD])
def test_a_job_that_is_in_order_has_no_finding(text: str, tmp_path: Path) -> None:
    assert check(tmp_path, text) == []


@pytest.mark.parametrize(("before", "after", "found"), [
    ("#SBATCH --mem", "#SBACTH --mem", [("warning", "job_directive_ignored", 6), ("info", "job_memory", 4)]),
    ("#SBATCH --mem", "##SBATCH --mem", [("info", "job_memory", 4)]),
    ("\nexport", "\nhostname\n#SBATCH --requeue\nexport", [("warning", "job_directive_ignored", 10)]),
    ("#SBATCH --mem=64G", "#SBATCH --mem=$MEMORY", [("warning", "job_directive_variable", 6)]),
    ("nodes=2", "nodes=2 -n 4", [("warning", "job_tasks_contradict", 2), ("info", "job_tasks_and_gpus", 14)]),
    ("nodes=2", "nodes=2 -n 8", []),
    ("nodes=2", "nodes={nodes}", []),
    ("srun --kill-on-bad-exit=1 \\\n    ", "", [("warning", "job_tasks_without_srun", 14)]),
    ("srun", 'RUN="srun -l"\n$RUN', []),
    ("srun --kill-on-bad-exit=1 \\\n    ", "torchrun ", [("warning", "job_tasks_without_srun", 14)]),
    ("python -u", "torchrun --nproc_per_node=4", [("blocker", "job_launcher_per_task", 14)]),
    ("python -u", "torchrun --nproc_per_node $SLURM_GPUS_ON_NODE", [("blocker", "job_launcher_per_task", 14)]),
    ("python -u", "torchrun --nproc_per_node=1", []),
    ("python -u", "accelerate launch", [("blocker", "job_launcher_per_task", 14)]),
    ("srun", "srun -N 2 --ntasks-per-node=1", [("info", "job_tasks_and_gpus", 14)]),
    ("a100:4", "a100:2", [("warning", "job_tasks_and_gpus", 14)]),
    ("--gpus-per-node=a100:4", "--gres=gpu:8", [("info", "job_tasks_and_gpus", 14)]),
    ("--gpus-per-node=a100:4", "--gres=gpu:1g.10gb:4", []),
    ("--gpus-per-node=a100:4", "--gpus=8", []),
    ("=$(scontrol show", "=localhost # $(scontrol show", []),
    (FIRST_NODE, "127.0.0.1", [("blocker", "job_master_localhost", 9)]),
    (FIRST_NODE, "${MASTER_ADDR:-localhost}", []),
    (" --signal=B:USR1@120", "", [("info", "job_time_limit", 7)]),
    ("#SBATCH -c 8\n", "#SBATCH -c 1\n", [("warning", "job_cores", 5)]),
    ("#SBATCH -c 8\n", "#SBATCH -c 1 --exclusive\n", []),
])  # fmt: skip
def test_what_a_batch_script_gets_wrong(
    before: str, after: str, found: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    assert before in SLURM
    assert facts(check(tmp_path, SLURM.replace(before, after, 1))) == found


def test_a_directive_below_a_command(tmp_path: Path) -> None:
    late = re.sub(r"cat.*?EOF\n.*?EOF\n", "", SLURM, flags=re.DOTALL).replace(
        "#SBATCH -c", "module load cuda\n#SBATCH -c"
    )
    found = check(tmp_path, late)
    assert ("warning", "job_directive_ignored", 6) in facts(found)
    assert facts(check(tmp_path, late + "sbatch next.sh\n"))[0][1] != "job_directive_ignored"


@pytest.mark.parametrize(("text", "found"), [
    (TORCHRUN.replace("--nnodes=2", "--node_rank 0"), [("blocker", "job_node_rank_fixed")]),
    (TORCHRUN.replace("--nnodes=2", "--node_rank 0 --rdzv_backend=c10d"), []),
    (TORCHRUN.replace("srun", "bash -c 'srun"), []),
    (ONE_NODE.replace(SRUN, ""), [("warning", "job_tasks_without_srun")]),
    (ONE_NODE.replace(SRUN, "").replace("a100:4", "1"), [("info", "job_tasks_without_srun")]),
    (ONE_NODE.replace("srun --kill-on-bad-exit=1 \\\n    python -u", "torchrun"), []),
    (ONE_NODE.replace(SRUN, "mpirun -n 4 "), []),
])  # fmt: skip
def test_how_the_tasks_are_started(text: str, found: list[tuple[str, str]], tmp_path: Path) -> None:
    assert [row[:2] for row in facts(check(tmp_path, text))] == found


def test_lightning_needs_a_task_for_each_gpu(tmp_path: Path) -> None:
    text = SLURM.replace("node=4\n", "node=1\n", 1)
    assert facts(check(tmp_path, text)) == [("info", "job_tasks_and_gpus", 14)]
    assert facts(check(tmp_path, text, "import lightning as L\n")) == [("warning", "job_tasks_and_gpus", 14)]
    assert facts(check(tmp_path, text, "import torch  # not lightning\n")) == [("info", "job_tasks_and_gpus", 14)]


@pytest.mark.parametrize(("before", "after", "found"), [
    ("batch/v1", "batch/v1beta1", [("blocker", "job_api_version", 1)]),
    ("kind: Job", "kind: job", [("blocker", "job_api_version", 2)]),
    ("restartPolicy: Never", "restartPolicy: Always", [("blocker", "job_restart", 10)]),
    ("      restartPolicy: Never\n", "", [("blocker", "job_restart", 10)]),
    ("backoffLimit: 3", "backoffLimit: 100000", [("warning", "job_restart", 7)]),
    (COMMAND, "torchrun", [("blocker", "job_command", 14)]),
    (COMMAND, '["bash", "-c", "torchrun"]', [("blocker", "job_command", 15)]),
    ("nnodes=2", "nnodes=3", [("blocker", "job_world_size", 15)]),
    ("nnodes=2", "nnodes=1:3", []),
    ("per_node=4", "per_node=8", [("blocker", "job_world_size", 19)]),
    ('"8"', '"2"', []),
    ('"8"', '"16"', [("blocker", "job_world_size", 17)]),
    ("train-0.train", "localhost", [("blocker", "job_master_localhost", 18)]),
    ("gpu: 4", "gpu: 0.5", [("blocker", "job_resources", 22), ("blocker", "job_world_size", 17)]),
    ("memory: 32Gi", "memory: 96Gi", [("blocker", "job_resources", 20)]),
    ("{memory: 32Gi}", "{nvidia.com/gpu: 2}", [("blocker", "job_resources", 20)]),
    ("{memory: 32Gi}", '{nvidia.com/gpu: "4"}', []),
    ("{memory: 32Gi}", "{nvidia.com/mig-1g.5gb: 1}", [("blocker", "job_resources", 20)]),
    ("            memory: 64Gi\n", "", [("info", "job_memory", 19)]),
    ("sizeLimit: 8Gi", "sizeLimit: 65G", []),
    ("sizeLimit: 8Gi", "sizeLimit: 96Gi", [("warning", "job_shared_memory", 30)]),
    ("          medium: Memory\n", "", [("warning", "job_shared_memory", 26)]),
    ("/dev/shm/", "/cache", [("warning", "job_shared_memory", 24)]),
])  # fmt: skip
def test_what_a_manifest_gets_wrong(before: str, after: str, found: list[tuple[str, str, int]], tmp_path: Path) -> None:
    assert before in JOB
    assert facts(check(tmp_path, JOB.replace(before, after, 1))) == found


@pytest.mark.parametrize(("text", "found"), [
    (POD.replace("  restartPolicy: Never\n", ""), [("warning", "job_restart")]),
    (POD.replace("  restartPolicy: Never\n", "").replace("train.py", "serve.py"), []),
    (POD.replace('sh, -c, "python train.py --lr 1"', "python train.py"), [("blocker", "job_command")]),
    (JOB.replace("batch/v1\nkind: Job", "kubeflow.org/v1beta2\nkind: PyTorchJob"), [("blocker", "job_api_version")]),
    (JOB.replace("batch/v1\nkind: Job", "example.com/v9\nkind: Training"), []),
    ("kind: List\napiVersion: v1\nitems:\n- " + JOB.replace("\n", "\n  "), []),
    ("a: &a {replicas: 9}\n---\n" + JOB, []),
])  # fmt: skip
def test_other_kinds(text: str, found: list[tuple[str, str]], tmp_path: Path) -> None:
    assert [row[:2] for row in facts(check(tmp_path, text))] == found


@pytest.mark.parametrize("text", [
    "", "a: [", "{{ .Values.x }}: 1\n- a", "just text", "- 1\n- 2", "apiVersion: v1\n", "[" * 5000, "a: &a [*a]",
    "apiVersion: v1\nkind: Pod\nspec: {containers: [1, x, {resources: 5}, {resources: {limits: x}, env: 3}]}",
    "apiVersion: [1]\nkind: {}\nspec: {volumes: 1, containers: [{volumeMounts: [1, {mountPath: /dev/shm, name: {}}]}]}",
    f"apiVersion: v1\nkind: Pod\nspec: {{replicas: {'9' * 500}, containers: [{{resources: {{limits: {{1: 2}}}}}}]}}",
    "#!/bin/sh\n#SBATCH", "#SBATCH -n\n#SBATCH --\n#SBATCH -N -n", "#!/bin/sh\ncat <<EOF",
    "#!/bin/sh\nsrun python x.py '",
])  # fmt: skip
def test_what_is_no_job_is_unknown_or_silent(text: str, tmp_path: Path) -> None:
    assert {found.severity for found in check(tmp_path, text)} <= {"unknown"}
