"""Whether the largest batch of a training fits its device: tried for real, in a process of its own.

    python -m stoker.planning.memory_fit config.toml try

Settings are derived as for a training, which tries the worst-case batch (`defaults/auto_batch.py`). On an accelerator
its peak memory and its speed are then measured; a CPU's memory is counted, and its speed estimated. It prints a
`MemoryFit` as JSON, or a `Refusal`. Without a device (`predict` instead of `try`) it prints a `PredictedFit`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from stoker.config.settings import Config, from_toml, to_toml
from stoker.errors import StokerError
from stoker.preflight.programs import run_program
from stoker.report import format as fmt

PREDICTED_GPUS = ("l4", "a100-40")
"""Keys of common GPUs (`accelerators.py`) with the same precision, so that the step is traced once for both."""
CHECKPOINT_COPIES = 3
"""Of the weights in a checkpoint: weights, EMA weights, momentum. AdamW has one more, counted by `make_fit`."""
PARAMETER_BYTES = 4


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worst-case batch of a training on this device."""

    device: str
    """NVIDIA L4, or the model of the CPU."""
    is_cpu: bool
    model: str
    image_size: tuple[int, int]
    """Height, width."""
    batch_size: int
    """Images per optimizer step."""
    micro_batches: int
    precision: str
    evidence: str
    """Why this batch size."""
    peak_bytes: int | None = None
    """Measured; None: only counted."""
    budget_bytes: int
    images_per_s: float
    """Measured where `peak_bytes` is."""
    checkpoint_bytes: int
    decode_core_s: float | None = None
    """Core-seconds to decode and resize an image; None: could not be measured."""

    @property
    def measured(self) -> bool:
        return self.peak_bytes is not None


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The error that training would end with."""

    what: str
    location: str | None = None
    cause: str | None = None
    fix: str | None = None
    exit_code: int = 1


class PredictedFit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worst-case batch of a training on GPUs that are not here."""

    model: str
    fitting: list[str]
    """Keys of the GPUs whose memory it fits."""
    texts: list[str]
    """A clause for each GPU, with the figures."""


def try_memory_fit(config: Config, timeout_s: float) -> MemoryFit | Refusal:
    """Runs the program. Raises subprocess.TimeoutExpired; ChildProcessError if it died."""
    return msgspec.convert(_run(config, timeout_s, "try"), MemoryFit | Refusal)


def predict_memory_fit(config: Config, timeout_s: float) -> PredictedFit | Refusal:
    """The same where there is no device: for PREDICTED_GPUS."""
    return msgspec.convert(_run(config, timeout_s, "predict"), PredictedFit | Refusal)


def _run(config: Config, timeout_s: float, mode: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config, {}))
        command = [sys.executable, "-m", "stoker.planning.memory_fit", str(path), mode]
        ended = run_program(command, timeout_s)
    try:
        return msgspec.json.decode(ended.last_line)
    except msgspec.DecodeError as error:
        raise ChildProcessError(ended.reason) from error


def make_prediction(user_config: Config) -> PredictedFit:
    """Traces the step (`predict.py`), with the batch that training would take. Raises StokerError."""
    import torch

    from stoker.data.index import open_index_of
    from stoker.hardware.device import Device
    from stoker.planning.accelerators import find_accelerator
    from stoker.planning.predict import predict_steps
    from stoker.training.defaults.derive import derive_for_plan

    index = open_index_of(user_config.data)
    config, _ = derive_for_plan(user_config, index, Device(torch.device("cuda")))
    accelerators = [find_accelerator(key) for key in PREDICTED_GPUS]
    predictions = predict_steps(user_config, index, accelerators, batch_size=config.run.batch_size)
    texts = []
    for step in predictions:
        micro = "" if step.micro_batches == 1 else f" in {step.micro_batches} micro-batches"
        used = f"{fmt.size(step.peak_bytes)} ± {fmt.percentage(step.peak_error)} of {fmt.size(step.memory_bytes)}"
        texts.append(f"{step.accelerator}: {used} with batches of {step.batch_size}{micro}")
    fitting = [step.accelerator for step in predictions if step.fits]
    return PredictedFit(model=predictions[0].model, fitting=fitting, texts=texts)


def make_fit(user_config: Config) -> MemoryFit:
    """Derives the settings, which tries the batch, and measures it. Raises StokerError where training would."""
    from stoker.data.index import open_index_of
    from stoker.hardware.device import select_device
    from stoker.models import get_architecture
    from stoker.planning.predict import loader_demand
    from stoker.training.defaults.auto_batch import make_dry_run, run_trials
    from stoker.training.defaults.derive import derive
    from stoker.training.defaults.model_choice import estimate_images_per_second

    device = select_device(user_config.run.device)
    index = open_index_of(user_config.data)
    config, reasons = derive(user_config.replace(jpeg_decoder="cpu", compile=False), index, device)
    dry_run = make_dry_run(config, index, device)
    batch_size, micro_batches = config.run.batch_size, config.optim.grad_accum_steps
    images_per_s = estimate_images_per_second(get_architecture(config.model.model), config.data.image_size)
    peak_bytes = None
    if not device.is_cpu:
        trials, end = run_trials(dry_run, len(index.image_indices("train")), batch_size // micro_batches)
        if not trials:
            raise StokerError("The batch that fitted at first does not fit again.", cause=end)
        peak_bytes, images_per_s = trials[0].peak_bytes, 1 / trials[0].seconds_per_image
    parameters = sum(parameter.numel() for parameter in dry_run.optimizer.model.parameters())
    copies = CHECKPOINT_COPIES + (config.optim.optimizer == "adamw")
    try:
        decode_core_s = loader_demand(config, index).decode_core_s
    except StokerError:  # no image can be decoded: another probe reports that
        decode_core_s = None
    return MemoryFit(
        device=device.name,
        is_cpu=device.is_cpu,
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=batch_size,
        micro_batches=micro_batches,
        precision=config.run.precision,
        evidence=reasons.get("batch_size") or reasons.get("grad_accum_steps") or "",
        peak_bytes=peak_bytes,
        budget_bytes=dry_run.budget_bytes,
        images_per_s=images_per_s,
        checkpoint_bytes=copies * parameters * PARAMETER_BYTES,
        decode_core_s=decode_core_s,
    )


def main(config_toml: Path, mode: str) -> None:
    """mode: try, predict."""
    config, _ = from_toml(config_toml)
    result: MemoryFit | PredictedFit | Refusal
    try:
        result = make_fit(config) if mode == "try" else make_prediction(config)
    except StokerError as error:
        fields: dict[str, Any] = {name: getattr(error, name) for name in ("what", "location", "cause", "fix")}
        result = Refusal(**fields, exit_code=error.exit_code)
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
