"""Whether the largest batch of a training fits its device: tried for real, in a process of its own.

    python -m stoker.planning.memory_fit config.toml try

Settings are derived as for a training, which tries the worst-case batch (`defaults/auto_batch.py`). On an accelerator
its peak memory and its speed are then measured; a CPU's memory is counted, and its speed estimated. Without a device
(`predict` instead of `try`), it is predicted for common GPUs. It prints an `Answer` as JSON.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stoker.config.settings import Config, from_toml, to_toml
from stoker.errors import OutOfMemoryError, StokerError
from stoker.findings.finding import Finding
from stoker.preflight.catalog import make_finding, ok, unknown
from stoker.preflight.programs import run_program
from stoker.report import format as fmt

PREDICTED_GPUS = ("l4", "a100-40")
"""Keys of common GPUs (`accelerators.py`) with the same precision, so that the step is traced once for both."""
CHECKPOINT_COPIES = 3
"""Of the weights in a checkpoint: weights, EMA weights, momentum. AdamW has one more, counted by `make_fit`."""
PARAMETER_BYTES = 4


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
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

    def finding(self) -> Finding:
        micro = "" if self.micro_batches == 1 else f" in {self.micro_batches} micro-batches"
        used = "" if self.peak_bytes is None else f": {fmt.memory(self.peak_bytes, self.budget_bytes)}"
        height, width = self.image_size
        tried = "tried on the device" if self.measured else "counted"
        speed = f"; {self.images_per_s:,.0f} img/s" if self.measured else ""
        return ok(
            "memory_fit",
            f"a batch of {self.batch_size}{micro} fits the memory of {self.device}{used}",
            f"{self.model}, {width}x{height}, {self.precision}, worst case {tried}; {self.evidence}{speed}",
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the program prints. fit: None unless a batch was tried and fits."""

    finding: Finding
    fit: MemoryFit | None = None


def ask_memory_fit(config: Config, timeout_s: float, *, predict: bool = False) -> Answer:
    """Runs the program. predict: for PREDICTED_GPUS, where there is no device to try it on."""
    title = "whether the batch fits the memory"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config, {}))
        command = [sys.executable, "-m", "stoker.planning.memory_fit", str(path), "predict" if predict else "try"]
        try:
            ended = run_program(command, timeout_s)
        except subprocess.TimeoutExpired:
            evidence = f"the trial did not end within {timeout_s:.0f} s"
            return Answer(finding=unknown("memory_fit", title, evidence, "--deep waits longer"))
    try:
        return msgspec.json.decode(ended.last_line, type=Answer)
    except msgspec.DecodeError:
        return Answer(finding=unknown("memory_fit", title, f"the trial failed: {ended.reason}"))


def refused(id: str, error: StokerError) -> Finding:
    """Training would end with this error."""
    title = error.what.rstrip(".")
    title = title[:1].lower() + title[1:] if title[1:2].islower() else title
    evidence = error.cause or "training would end with this error"
    return make_finding(id, "blocker", title, evidence, error.fix or "", error.location or "")


def predict_fit(user_config: Config) -> Finding:
    """Traces the step (`predict.py`), with the batch that training would take. Raises StokerError."""
    import torch

    from stoker.data.index import open_index_of
    from stoker.hardware.device import Device
    from stoker.planning.machines import find_accelerator
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
    fitting = ", ".join(step.accelerator for step in predictions if step.fits)
    fits = fitting or f"none of {', '.join(PREDICTED_GPUS)}"
    return make_finding(
        "memory_fit",
        "ok" if fitting else "warning",
        f"predicted, not tried: the batch of {config.model.model} fits {fits}",
        "; ".join(texts),
        "" if fitting else "a smaller --image-size or --model, or --activation-checkpointing",
    )


def make_fit(user_config: Config) -> MemoryFit:
    """Derives the settings, which tries the batch, and measures it. Raises StokerError where training would."""
    from stoker.data.index import open_index_of
    from stoker.hardware.device import select_device
    from stoker.models import get_architecture
    from stoker.planning.predict import loader_demand
    from stoker.training.defaults.auto_batch import make_dry_run
    from stoker.training.defaults.derive import derive
    from stoker.training.defaults.dry_run import try_sizes
    from stoker.training.defaults.model_choice import estimate_images_per_second

    device = select_device(user_config.run.device)
    index = open_index_of(user_config.data)
    config, reasons = derive(user_config.replace(jpeg_decoder="cpu", compile=False), index, device)
    dry_run = make_dry_run(config, index, device)
    batch_size, micro_batches = config.run.batch_size, config.optim.grad_accum_steps
    images_per_s = estimate_images_per_second(get_architecture(config.model.model), config.data.image_size)
    peak_bytes = None
    if not device.is_cpu:
        trial = next(try_sizes(dry_run, [batch_size // micro_batches]))
        if isinstance(trial, str):
            raise StokerError("The batch that fitted at first does not fit again.", cause=trial)
        peak_bytes, images_per_s = trial.peak_bytes, 1 / trial.seconds_per_image
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
    try:
        fit = make_fit(config) if mode == "try" else None
        answer = Answer(finding=predict_fit(config) if fit is None else fit.finding(), fit=fit)
    except StokerError as error:
        id = "memory_fit" if isinstance(error, OutOfMemoryError) else "settings"
        answer = Answer(finding=refused(id, error))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
