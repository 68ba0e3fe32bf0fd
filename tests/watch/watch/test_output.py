"""What lines of real jobs say, and that nothing else says anything. The lines are those that the frameworks printed."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker_watch.watch.output import (
    MAX_LINE_LENGTH,
    PARSERS,
    LineSplitter,
    Progress,
    ProgressParser,
    parse_progress,
)

REAL = {
    "INFO:tensorflow:Step 100 per-step time 0.878s": Progress(step=100, step_s=0.878),
    "I1120 12:00:00.000000 140 model_lib_v2.py:705] Step 1200 per-step time 1.5s": Progress(step=1200, step_s=1.5),
    "INFO:tensorflow:Step 100 per-step time 0.878s loss=1.5": Progress(step=100, step_s=0.878, losses={"total": 1.5}),
    "INFO:tensorflow:{'Loss/classification_loss': 1.1206508,": Progress(losses={"classification_loss": 1.1206508}),
    " 'Loss/total_loss': 1.9,": Progress(losses={"total": 1.9}),
    " 'learning_rate': 0.0}": Progress(lr=0.0),
    "30/30 ━━━━━━━━━━ 1s 20ms/step - box_loss: 0.0302 - loss: 1.1006": Progress(
        step=30, total_steps=30, step_s=0.02, losses={"box_loss": 0.0302, "total": 1.1006}
    ),
    "12/30 [==>...........] - ETA: 1s - loss: 1.1 - val_loss: 2.0": Progress(
        step=12, total_steps=30, losses={"total": 1.1}
    ),
    "20/20 - 0s - 3ms/step - loss: 0.9181 - mae: 0.8056 - val_loss: 0.1690": Progress(
        step=20, total_steps=20, step_s=0.003, losses={"total": 0.9181}
    ),
    "Epoch 2/10": Progress(epoch=2),
    "Epoch: [0]  [ 2/12]  eta: 0:02:07  lr: 0.001367  loss: 5.3214 (5.3149)  loss_box_reg: 0.1 (0.2)  "
    "time: 12.7618  data: 0.0448": Progress(
        step=3, total_steps=12, epoch=0, lr=0.001367, losses={"total": 5.3214, "loss_box_reg": 0.1}, step_s=12.7618,
        input_wait_s=0.0448,
    ),
    "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size": Progress(
        loss_columns=("box_loss", "cls_loss", "dfl_loss")
    ),
    "1/2  0G  4.76  4.702  4.287  16  320: 100% ━━━ 6/6 1.0it/s 5.8s": Progress(
        step=6, total_steps=6, epoch=1, losses={"loss_1": 4.76, "loss_2": 4.702, "loss_3": 4.287}
    ),
    "      1/100      2.61G      1.153      1.398      1.192         81        640:  12%|█▎        | 1/8 [00:04<00:00, "
    " 1.9it/s]": Progress(
        step=1, total_steps=8, epoch=1, losses={"loss_1": 1.153, "loss_2": 1.398, "loss_3": 1.192}
    ),
    "        1/2         0G     0.7274     0.6835     0.4313          4         64: 33% ━━━━──────── 2/6 5.0it/s "
    "0.3s<0.8s": Progress(
        step=2, total_steps=6, epoch=1, losses={"loss_1": 0.7274, "loss_2": 0.6835, "loss_3": 0.4313}
    ),
    "Epoch 0:  50%|█████     | 50/100 [00:05<00:05,  9.90it/s, v_num=0, train_loss=0.512]": Progress(
        step=50, total_steps=100, epoch=0, losses={"total": 0.512}
    ),
    "{'loss': '64.23', 'grad_norm': '836', 'learning_rate': '5e-05', 'epoch': '0.5'}": Progress(
        losses={"total": 64.23}, grad_norm=836.0, lr=5e-5
    ),
    "{'loss': 0.5, 'learning_rate': 4.9e-05, 'epoch': 0.02}": Progress(losses={"total": 0.5}, lr=4.9e-5),
    "  5%|▌         | 5/100 [00:10<03:10,  2.00s/it]": Progress(step=5, total_steps=100, is_bare_bar=True),
    "  5%|▌         | 5/100 [00:10<03:10,  2.00s/it, MSE=0.053]": Progress(
        step=5, total_steps=100, losses={"total": 0.053}
    ),
    "  5%|▌         | 5/100 [00:10<03:10,  2.00s/it, mae=0.2, mse=0.053]": Progress(
        step=5, total_steps=100, is_bare_bar=True
    ),
    "step 100 loss=0.53 lr=0.001": Progress(step=100, losses={"total": 0.53}, lr=0.001),
    # torch's ImageNet example (yjh0410/pytorch-imagenet issue 1), and an SSD tutorial after it
    "Epoch: [0][  400/80073]\tTime  0.315 ( 0.372)\tData  0.002 ( 0.073)\tLoss 6.9802e+00 (7.0827e+00)\tAcc@1   0.00 "
    "(  0.08)\tAcc@5   6.25 (  0.55)\tlr 0.000000 (0.000002)": Progress(
        epoch=0, step=400, total_steps=80073, losses={"total": 6.9802}, lr=0.0, step_s=0.315, input_wait_s=0.002
    ),
    "Epoch: [3][0/518]\tBatch Time 5.1 (5.1)\tData Time 0.9 (0.9)\tLoss 22.8 (22.8)\t": Progress(
        epoch=3, step=0, total_steps=518, losses={"total": 22.8}, step_s=5.1, input_wait_s=0.9
    ),
    # timm, and OpenPCDet after it (pull request 1229)
    "Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.96)  Time: 0.35s, 2900/s  LR: 1.000e-05  Data: 0.011 (0.08)": Progress(
        epoch=0, step=50, total_steps=1251, losses={"total": 6.95}, lr=1e-5
    ),
    "2023-01-05 16:34:49   INFO  Train:    1/3 ( 33%) [  49/323 ( 15%)]  Loss: 36.77 (81.7)  LR: 1.351e-04": Progress(
        epoch=1, step=49, total_steps=323, losses={"total": 36.77}, lr=1.351e-4
    ),
    # nanoGPT, and a plain loop
    "iter 250: loss 3.2910, time 141.05ms, mfu 22.01%": Progress(step=250, losses={"total": 3.291}),
    "step 10 loss 0.5": Progress(step=10, losses={"total": 0.5}),
    "Step: 7/1000, Loss: 0,53, 12.5 img/s": Progress(step=7, total_steps=1000, losses={"total": 0.53}, img_per_s=12.5),
    "Epoch [3], iter [20/50], loss: 1.2e-3": Progress(step=20, total_steps=50, epoch=3, losses={"total": 1.2e-3}),
    "loss: 0.25": Progress(losses={"total": 0.25}),
}  # fmt: skip


@pytest.mark.parametrize("line", REAL, ids=lambda line: line[:40])
def test_lines_that_frameworks_print(line: str) -> None:
    assert parse_progress(line) == REAL[line]


def test_a_nan_loss_is_kept() -> None:
    found = parse_progress("step 3 loss: nan")
    assert found is not None
    assert math.isnan(found.losses["total"])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Test: [ 0/12]  eta: 0:00:10  model_time: 0.1 (0.1)  time: 0.4  data: 0.2",
        "            Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|███| 3/3 [00:01]",
        "Downloading: 100%|██████████| 5.0M/10M [00:01<00:01, 5.00MB/s]",
        "Validation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 20.00it/s]",
        "{'eval_loss': 0.4, 'eval_runtime': 3.0, 'epoch': 1.0}",
        "30/30 ━━━━━━━━━━ 1s 20ms/step",
        "At a total loss: 3 ships were sunk in step 5.",
        "We did 100 steps and the loss is 0.5 now",
        "val_loss: 0.5",
        "  CENTER_LOSS_WEIGHT: 0.0005",  # reid-strong-baseline prints its settings
    ],
)
def test_what_is_no_progress(line: str) -> None:
    assert parse_progress(line) is None


words = st.sampled_from(
    [
        "the",
        "loss",
        "of",
        "step",
        "epoch",
        "rate",
        "and",
        "batch",
        "image",
        "was",
        "lr",
        "INFO",
        "learning",
        "Loss",
        "total",
        "it",
        "3",
        "12",
        "0.5",
        "7/9",
        "100%",
        "nan",
    ]
)


@given(st.lists(words, max_size=30), st.sampled_from([" ", ", ", "; "]))
def test_prose_has_no_progress(said: list[str], between: str) -> None:
    named = {word.lower() for word, value in itertools.pairwise(said) if value[0].isdigit() or value == "nan"}
    counted = "loss" in named and named & {"step", "epoch", "batch", "it"}
    assume(not counted)  # "loss 0.5 step 3" is what many loops print
    assert parse_progress(between.join(said)) is None


@given(st.binary(max_size=400), st.integers(0, 400))
def test_bytes_of_any_kind_end_nothing_and_cuts_change_nothing(data: bytes, cut: int) -> None:
    whole, cut_up = LineSplitter(), LineSplitter()
    lines = whole.feed(data) + whole.feed(b"", final=True)
    assert cut_up.feed(data[:cut]) + cut_up.feed(data[cut:]) + cut_up.feed(b"", final=True) == lines
    for line in lines:
        parse_progress(line)


@given(st.text(alphabet="0123456789.,:=/|%[]{}'<>it/sloEpch- \x1b", max_size=MAX_LINE_LENGTH))
def test_no_parser_raises_on_what_looks_like_progress(line: str) -> None:
    for parser in PARSERS:
        parser(line)


def test_overwritten_colored_and_long_lines() -> None:
    lines = LineSplitter()
    data = "1/3 \x1b[32m━━\x1b[0m 0s\b\b\b\b2/3 x\r3/3 y\n\n\x1b]0;title\x07z".encode()
    assert lines.feed(data) == ["1/3 ━━ 0s", "2/3 x", "3/3 y"]
    assert lines.feed(b"", final=True) == ["z"]
    assert len(LineSplitter().feed(b"a" * 10**6 + b"\n")[0]) == MAX_LINE_LENGTH


FIT = ["Epoch 1/2", " 1/20 ━━━━ 0s 25ms/step - loss: 1.5", "20/20 ━━━━ 0s 4ms/step - loss: 0.7 - val_loss: 0.6",
       "Epoch 2/2", "20/20 ━━━━ 0s 4ms/step - loss: 0.5 - val_loss: 0.4"]  # fmt: skip
EVALUATE = [" 1/40 ━━━━ 0s 3ms/step - loss: 0.05", "40/40 ━━━━ 0s 1ms/step - loss: 0.05"]


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (FIT + EVALUATE, [1, 20, 20]),
        (FIT + EVALUATE + FIT[:3] + EVALUATE, [1, 20, 20, 1, 20]),
        (FIT[1:3], [1, 20]),  # one epoch, of which Keras says nothing
        (["Epoch 1/2", "20/20 - 0s - 3ms/step - loss: 0.9", "40/40 - 0s - 1ms/step - loss: 0.08"], [20]),
    ],
)
def test_keras_counts_the_bars_of_training_alone(lines: list[str], steps: list[int]) -> None:
    reader = ProgressParser()
    found = [progress for line in lines if (progress := reader.read(line)) is not None]
    assert [progress.step for progress in found if progress.step is not None] == steps


def test_what_is_printed_behind_a_bar_is_a_line() -> None:
    """tqdm's bar ends no line, and `print` goes on in it (matthias-wright/flaxmodels, training/resnet)."""
    lines = LineSplitter().feed(
        b"\r  0%|          | 0/3200 [00:00<?, ?it/s]step 0 loss 2.8475 accuracy 0.0312\n"
        b"\r 61%|######    | 1952/3200 [00:03<00:01, 1116.80it/s]step 50 loss 2.2949 accuracy 0.1250\n"
        b"\r 61%|######    | 1952/3200 [00:03<00:01, 1116.80it/s, loss=0.5]\n"
    )
    found = [parse_progress(line) for line in lines]
    assert [(one.step, one.losses) for one in found if one is not None and one.losses] == [
        (0, {"total": 2.8475}), (50, {"total": 2.2949}), (1952, {"total": 0.5})
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "step"), [("4.91batch/s", 8), ("1.2s/img", 8), ("1.2MB/s", None), ("10.3kB/s", None)])
def test_a_bar_may_have_a_unit_of_its_own(rate: str, step: int | None) -> None:
    progress = parse_progress(f" 13%|#3        | 8/60 [00:01<00:10, {rate}, Total Loss=1.17]")
    assert (None if progress is None else progress.step) == step
