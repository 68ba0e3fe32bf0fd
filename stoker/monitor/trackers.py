"""Logs the metrics of a run to Weights & Biases or MLflow. Both are optional extras of the package.

Each reads its own variables (WANDB_PROJECT, WANDB_MODE; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME) and credentials. A
later attempt of a run continues the same tracked run: its id depends on the run folder and the time of its first line.
"""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from stoker.monitor.follow import RecordLine
from stoker.runs.schemas import DeviceSample, Event, StepWindow


class WandbTracker:
    """A run of Weights & Biases. Raises ImportError, and the exceptions of wandb."""

    def __init__(self, *, name: str, run_id: str, settings: dict[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(name=name, id=run_id, resume="allow", config=settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """A run of MLflow, in the experiment MLFLOW_EXPERIMENT_NAME. Raises ImportError, and the exceptions of MLflow."""

    def __init__(self, *, name: str, run_id: str, settings: dict[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = (
            self._client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        )
        existing_runs = self._client.search_runs(
            [experiment_id], filter_string=f"tags.`stoker.id` = '{run_id}'", max_results=1
        )
        if existing_runs:
            self._run_id = existing_runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(experiment_id, run_name=name, tags={"stoker.id": run_id}).info.run_id
            for key, value in settings.items():
                self._client.log_param(self._run_id, key, value)

    def log(self, values: dict[str, float], step: int) -> None:
        """Sends all values in one request: each second has dozens of values."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[WandbTracker] | type[MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def tracker_run_id(run: Path, start_t: float) -> str:
    """The same id for all attempts of a run."""
    return hashlib.sha256(f"{run.absolute()} {start_t}".encode()).hexdigest()[:16]


def tracker_metrics(line: RecordLine) -> dict[str, float]:
    """Metrics of a line of records, by name."""
    if isinstance(line, StepWindow):
        if not line.window_steps or line.wall_s <= 0:
            return {}
        device_s = line.wall_s * line.devices
        values = {f"loss/{name}": value for name, value in line.losses.items()}
        values |= {f"time/{phase}": duration_s / device_s for phase, duration_s in line.phases.items()}
        values |= {"img_per_s": line.num_images / line.wall_s} if line.num_images else {}
        values |= {} if line.lr is None else {"lr": line.lr}
        return values | ({} if line.grad_norm is None else {"grad_norm": line.grad_norm})
    if isinstance(line, DeviceSample):
        return {
            f"gpu/{gpu.index}/{name}": float(value) for gpu in line.gpus
            for name, value in (("utilization", gpu.utilization), ("memory_bytes", gpu.memory_used_bytes))
            if value is not None
        }  # fmt: skip
    scores = line.data.get("metrics", {}) if isinstance(line, Event) and line.kind == "evaluated" else {}
    return {f"score/{name}": float(value) for name, value in scores.items() if isinstance(value, int | float)}
