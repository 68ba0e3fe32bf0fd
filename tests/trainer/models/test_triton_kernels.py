"""The Triton kernels of RetinaNet's loss: in Triton's interpreter they equal the separate operators, and they compile
for a T4 (sm_75), an A100 (sm_80) and an H200 (sm_90) where there is no GPU. On a GPU: gpu/test_kernels.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.models import build
from tests import fakes
from tests.trainer.models.samples import settings_of

triton = pytest.importorskip("triton", reason="Triton comes with the CUDA build of torch")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    if triton.__version__.startswith("3.6.") and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(
            "the interpreter of Triton 3.6 runs no loop with NumPy 2.4: it converts arrays of one element to int"
        )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.models.interpreted_kernels"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_matches_are_those_of_the_separate_operators(interpreted: dict[str, Any]) -> None:
    assert interpreted["matches"] == dict.fromkeys(interpreted["matches"], True)


def test_no_ious_are_computed_for_tiles_without_a_box(interpreted: dict[str, Any]) -> None:
    """Images with 0, 1, 8, 9 and 40 boxes in 40 slots, and 300 anchors: tiles of 8 boxes and 256 anchors, twice."""
    assert interpreted["tiles"] == (0 + 1 + 1 + 2 + 5) * 2 * 2


def test_focal_losses_and_gradients_are_those_of_the_separate_operators(interpreted: dict[str, Any]) -> None:
    for name, difference in interpreted["focal"].items():
        assert difference["any"] > 0, name
        assert difference["sums"] < 1e-5, name
        # In bf16 the separate operators round twice, first the derivative.
        assert difference["gradients"] <= (1.5 if "bf16" in name else 1e-5), name
    assert interpreted["ignored"] == {"sums": 0, "gradients": 0, "any": 0}


def test_a_detector_trains_as_with_the_separate_operators(interpreted: dict[str, Any]) -> None:
    assert interpreted["detector"]["losses"] < 1e-5
    assert interpreted["detector"]["gradients"] < 1e-5


def test_the_trial_at_the_start_of_a_run_compares_both(interpreted: dict[str, Any]) -> None:
    found = interpreted["trial"]
    assert min(found["separate"], found["fused"]) > 0
    assert 0 < found["difference"] < 2**-7  # a unit in the last place of bf16, where a level has few gradients


TYPES = {
    "boxes": "*fp32", "valid": "*i1", "anchors": "*fp32", "largest": "*i32", "matched": "*i64", "target": "*i64",
    "sums": "*fp32", "grad": "*fp32", "logits": "*bf16", "out": "*bf16",
    "fg_iou_thresh": "fp32", "bg_iou_thresh": "fp32", "alpha": "fp32",
}  # fmt: skip


def compile_for(
    capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], folder: Path
) -> tuple[str, dict[str, int]]:
    """The PTX of a kernel, and the resources that it uses. constants: with compiler options; types: of the parameters
    that are not int32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = {parameter: constants[parameter] for parameter in kernel.arg_names if parameter in constants}
    source = ASTSource(
        fn=kernel,
        signature={
            parameter: "constexpr" if parameter in values else types.get(parameter, "i32")
            for parameter in kernel.arg_names
        },
        constexprs={(kernel.arg_names.index(parameter),): value for parameter, value in values.items()},
    )
    options = {option: value for option, value in constants.items() if option in ("num_warps", "enable_fp_fusion")}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (folder / "cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "--dump-resource-usage", folder / "cubin"], capture_output=True, text=True, check=True
    ).stdout
    return compiled.asm["ptx"], {
        kind: int(number) for kind, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)
    }


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize(
    "name", ["_largest_ious_kernel", "_match_kernel", "_focal_sums_kernel", "_focal_gradient_kernel"]
)
def test_a_kernel_compiles_without_spills(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stoker.models.layers import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_focal = "focal" in name
    constants = triton_kernels.focal_constants(2.0) | {"CLASSES": 80} if is_focal else triton_kernels.MATCH_CONSTANTS
    ptx, found = compile_for(capability, getattr(triton_kernels, name), TYPES, constants, tmp_path)
    with capsys.disabled():
        print(f"\n{name}, sm_{capability}: {found}")
    assert (found["STACK"], found["LOCAL"]) == (0, 0)  # spilled registers would be there
    if not is_focal:  # IoUs are rounded as those of separate operators
        assert "fma" not in ptx
        assert "div.rn.f32" in ptx


def test_a_step_with_the_kernels_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    monkeypatch.setattr(fakes, "DEVICE", "cuda")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (2**37, 2**37))
    model = build(settings_of("retinanet_tiny_fpn"), 80).train()
    model.fused_loss = True  # type: ignore[assignment]
    torch._dynamo.reset()
    compiled = torch.compile(lambda batch: model.loss(model(batch.images), batch), fullgraph=True, backend=backend)
    with fakes.fake_tensors():
        fakes.to_fake(model, "cuda")
        batch = fakes.fake_batch(fakes.Trial(model="retinanet_tiny_fpn"))
        model(batch.images)  # makes the anchors
        compiled(batch)
    found = [name for name in operators if name.startswith("stoker.")]
    assert sorted(found) == ["stoker.focal_sums", "stoker.match_anchors"]
