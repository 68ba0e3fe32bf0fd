"""How long a job waited for data is read from what it prints itself, in the formats of public training scripts."""

from pathlib import Path

import pytest

from stoker_watch.diagnosis.log_meters import find_printed_wait
from stoker_watch.diagnosis.termination import split_log_lines
from stoker_watch.report.explain import explain_log

FORMATS = {
    "github.com/pytorch/examples/issues/164": "Epoch: [0][{n}/5005]\tTime {step:.3f} (8.010)\tData {data:.3f} (7.720)\t"
    "Loss 6.9074 (6.9080)\tPrec@1 0.000 (0.026)",
    "timm: train.py": "Train: 0 [{n:>4}/1251 (  0%)]  Loss: 6.94 (6.94)  Time: {step:.3f}s,   47.49/s  "
    "(5.391s,   47.49/s)  LR: 1.000e-06  Data: {data:.3f} (3.012)",
    "torchvision: references/detection/utils.py": "Epoch: [0]  [{n}/119]  eta: 0:02:11  lr: 0.005  loss: 0.5 (0.7)  "
    "time: {step:.4f}  data: {data:.4f}  max mem: 3000",
    "mmcv: runner/hooks/logger/text.py": "2022-03-01 10:00:00,000 - mmdet - INFO - Epoch [1][{n}/7330]\tlr: 1.978e-03, "
    "eta: 1 day, time: {step:.3f}, data_time: {data:.3f}, memory: 3902, loss: 1.2",
    "mmengine: logging": "07/25 10:00:00 - mmengine - INFO - Epoch(train)  [1][{n}/7330]  lr: 1.9e-04  eta: 12:00:00  "
    "time: {step:.4f}  data_time: {data:.4f}  memory: 9000  loss: 1.2",
    "detectron2: utils/events.py": "[07/25 10:00:00 d2.utils.events]:  eta: 1:00:00  iter: {n}  total_loss: 1.2    "
    "time: {step:.4f}  last_time: 9.9999  data_time: {data:.4f}  last_data_time: 9.9999   lr: 0.001",
    "yolox: core/trainer.py": "2022-03-01 10:00:00 | INFO     | yolox.core.trainer:257 - epoch: 1/300, iter: {n}/924, "
    "mem: 2000Mb, iter_time: {step:.3f}s, data_time: {data:.3f}s, total_loss: 12.1, lr: 1.3e-07",
    "ppdet: engine/callbacks.py": "[03/01 10:00:00] ppdet.engine INFO: Epoch: [0] [{n}/500] learning_rate: 0.001 "
    "loss: 1.2 eta: 1:00:00 batch_cost: {step:.4f} data_cost: 9.9999 reader_cost: {data:.4f} ips: 12.5 images/s",
}


def log(form: str, times: list[tuple[float, float]]) -> str:
    return "".join(form.format(n=number, step=step, data=data) + "\n" for number, (step, data) in enumerate(times))


def waits(text: str) -> bool:
    found = find_printed_wait(split_log_lines(text.encode(), "train.log"))
    assert found is None or found.id == "input_bound"
    return found is not None


@pytest.mark.parametrize("source", FORMATS)
def test_a_wait_for_data_that_the_job_prints_is_found(source: str) -> None:
    found = find_printed_wait(split_log_lines(log(FORMATS[source], [(0.5, 0.4)] * 20).encode(), "train.log"))
    assert found is not None
    assert "5.0 s of steps, 4.0 s of them for data" in found.evidence[0].text
    assert not waits(log(FORMATS[source], [(0.5, 0.01)] * 20))


def test_slow_steps_at_the_start_and_few_lines_are_no_finding() -> None:
    """github.com/open-mmlab/mmpretrain/issues/408: only the first steps waited."""
    form = FORMATS["mmcv: runner/hooks/logger/text.py"]
    assert not waits(log(form, [(44.0, 43.5)] * 3 + [(0.5, 0.001)] * 9))
    assert not waits(log(form, [(0.5, 0.4)] * 2))
    assert waits(log(form, [(0.5, 0.4)] * 3))
    assert not waits(log(form, [(0.5, 0.2)] * 7))
    assert waits(log(form, [(0.5, 0.2)] * 8))
    assert waits(log(form, [(0.1, 0.0), (60.0, 59.9)] * 4))  # one step of a few waits for all


def test_times_that_are_printed_as_zero_are_no_wait() -> None:
    assert not waits(log(FORMATS["timm: train.py"], [(0.0, 0.0)] * 20))


@pytest.mark.parametrize(
    "line",
    [
        "Test:  [{n}/100]  eta: 0:00:05  model_time: 0.05  time: {step:.4f}  data: {data:.4f}  max mem: 3000",
        "07/25 - mmengine - INFO - Epoch(val)  [1][{n}/625]    eta: 0:00:40  time: {step:.4f}  data_time: {data:.4f}",
    ],
)
def test_evaluations_are_no_steps(line: str) -> None:
    assert not waits(log(line, [(0.5, 0.4)] * 20))


def test_a_log_says_the_wait_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(log(FORMATS["timm: train.py"], [(0.5, 0.4)] * 20))
    explained = explain_log(path)
    assert [found.id for found in explained.findings] == ["input_bound"]
    assert "DataLoader(num_workers=" in explained.findings[0].fix
    assert any("but for what it printed" in text for text in explained.not_known)


def test_the_table_of_lightnings_profiler_says_it() -> None:
    """github.com/time-series-foundation-models/lag-llama/issues/51."""
    row = "[_TrainingEpochLoop].train_dataloader_next |  5.2931                |  16      |  84.689    |  {}     |\n"
    assert waits(row.format("84.915"))
    assert not waits(row.format("4.915"))
    assert waits(row.replace("84.689", "1.0469e+05").format("84.915"))
    assert not waits(row.replace("84.689", "1.2.3").format("84.915"))
