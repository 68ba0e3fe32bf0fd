# ruff: noqa: E501
"""Lines that training programs of others printed, with what a reader of each says: the step, its total, the epoch, the
loss, the learning rate and the images per second. The lines are from public logs, READMEs and threads that show the
output of the program named."""

import math

import pytest

from stoker_watch.watch.output import ProgressParser

nan = math.nan

LINES: list[tuple[str, str, dict[str, float]]] = [
    ("mmdetection 2", "2022-06-03 06:33:38,427 - mmdet - INFO - Epoch [1][50/7517]     lr: 1.000e-02, eta: 2:00:00, time: 0.240, data_time: 0.051, memory: 2404, loss_rpn_cls: 0.1461, loss_rpn_bbox: 0.0187, loss_cls: 0.3264, acc: 95.1289, loss_bbox: 0.1275, loss: 0.6188", {"step": 50, "total": 7517, "epoch": 1, "loss": 0.6188, "lr": 0.01}),
    ("mmsegmentation 0", "2022-05-22 03:27:54,266 - mmseg - INFO - Iter [50/320000]\tlr: 9.799e-07, eta: 2 days, 18:10:31, time: 0.745, data_time: 0.010, memory: 7999, decode.loss_seg: 4.1118, decode.acc_seg: 0.2411, aux.loss_seg: 1.6321, aux.acc_seg: 0.9252, loss: 5.7440", {"step": 50, "total": 320000, "loss": 5.744, "lr": 9.799e-7}),
    ("mmengine, by iterations", "08/12 11:40:22 - mmengine - INFO - Iter(train) [  50/2000]  lr: 4.9841e-05  eta: 0:11:24  time: 0.2934  data_time: 0.0044  memory: 3725  grad_norm: 3.3291  loss: 2.5882  decode.loss_ce: 2.5882  decode.acc_seg: 46.7585", {"step": 50, "total": 2000, "loss": 2.5882, "lr": 4.9841e-5}),
    ("mmengine, YOLO-World", "2024/06/19 01:21:51 - mmengine - INFO - Epoch(train)  [1][  50/1509]  base_lr: 2.0000e-04 lr: 2.1648e-06  eta: 8:27:55  time: 0.2526  data_time: 0.0334  memory: 9182  grad_norm: nan  loss: 59.1782  loss_cls: 21.0711  loss_bbox: 18.8034  loss_dfl: 19.3038", {"step": 50, "total": 1509, "epoch": 1, "loss": 59.1782, "lr": 2.1648e-6}),
    ("detectron2", "[09/02 02:37:24 d2.utils.events]:  eta: 0:05:22  iter: 19  total_loss: 1.986  loss_cls: 0.595  loss_box_reg: 0.549  loss_mask: 0.697  loss_rpn_cls: 0.03067  loss_rpn_loc: 0.01108  time: 1.1678  data_time: 0.0222  lr: 1.6068e-05  max_mem: 2725M", {"step": 19, "loss": 1.986, "lr": 1.6068e-5}),
    ("Detectron", 'json_stats: {"accuracy_cls": "0.958008", "eta": "17:41:40", "iter": 44520, "loss": "0.453285", "loss_bbox": "0.089326", "lr": "0.010000"}', {"step": 44520, "loss": 0.453285, "lr": 0.01}),
    ("maskrcnn-benchmark", "2022-03-29 18:05:28,695 maskrcnn_benchmark.trainer INFO: eta: 8:01:37  iter: 20  loss: 1.4023 (1.7081)  loss_classifier: 0.0574 (0.2738)  loss_box_reg: 0.0000 (0.0033)", {"step": 20, "loss": 1.4023}),
    ("SlowFast", '[05/03 12:00:12][INFO] logging.py:  99: json_stats: {"_type": "train_iter", "dt_data": 0.01517, "dt_diff": 0.55199, "dt_net": 0.53681, "epoch": "8/30", "eta": "1:12:41", "gpu_mem": "5.22G", "iter": "10/344", "loss": 1.63013, "lr": 0.01000, "mem": 6, "noun_loss": 1.70481}', {"step": 10, "total": 344, "epoch": 8, "loss": 1.63013, "lr": 0.01}),
    ("fairseq", '2021-03-08 12:31:36 | INFO | train_inner | {"epoch": 1, "update": 0.0, "loss": "16.475", "ppl": "91120.8", "wps": "0", "ups": "0", "wpb": "16384", "bsz": "8", "num_updates": "1", "lr": "2e-05", "gnorm": "20.751", "loss_scale": "4", "train_wall": "99", "gb_free": "9.3", "wall": "105"}', {"step": 1, "epoch": 1, "loss": 16.475, "lr": 2e-5}),
    ("YOLOX", "2022-08-07 20:23:28 | INFO     | yolox.core.trainer:261 - epoch: 1/300, iter: 10/14786, mem: 584Mb, iter_time: 0.224s, data_time: 0.002s, total_loss: 14.6, iou_loss: 4.6, l1_loss: 0.0, conf_loss: 7.8, cls_loss: 2.1, lr: 2.287e-11, size: 416, ETA: 11 days, 11:38:15", {"step": 10, "total": 14786, "epoch": 1, "loss": 14.6, "lr": 2.287e-11}),
    ("PaddleDetection", "[08/15 04:02:46] ppdet.engine INFO: Epoch: [0] [   0/1929] learning_rate: 0.040000 loss_vfl: 1.216707 loss_bbox: 1.142163 loss_dfl: 0.544196 loss: 2.903065 eta: 17 days, 13:50:26 batch_cost: 15.7452 data_cost: 2.9112 ips: 1.5243 images/s", {"step": 0, "total": 1929, "epoch": 0, "loss": 2.903065, "lr": 0.04, "img_s": 1.5243}),
    ("PaddleSeg", "2021-08-11 09:11:42 [INFO]\t[TRAIN] epoch: 2, iter: 100/2000, loss: 2.1444, lr: 0.009553, batch_cost: 0.0922, reader_cost: 0.00007, ips: 43.3753 samples/sec | ETA 00:02:55", {"step": 100, "total": 2000, "epoch": 2, "loss": 2.1444, "lr": 0.009553, "img_s": 43.3753}),
    ("pytorch-retinanet of yhenon", "Epoch: 0 | Iteration: 0 | Classification loss: 3037.13330 | Regression loss: 9.85530 | Running loss: 3046.98853", {"step": 0, "epoch": 0, "loss": 3046.98853}),
    ("ssd.pytorch of amdegroot", "iter 10 || Loss: 14.9920 || timer: 0.1609 sec.", {"step": 10, "loss": 14.992}),
    ("faster-rcnn.pytorch of jwyang", "[session 1][epoch 21][iter 9800/10022] loss: 0.1174, lr: 1.00e-04", {"step": 9800, "total": 10022, "epoch": 21, "loss": 0.1174, "lr": 1e-4}),
    ("tf-faster-rcnn", "iter: 10 / 70000, total loss: 1.617437", {"step": 10, "total": 70000, "loss": 1.617437}),
    ("tf-faster-rcnn, broken boxes", "iter: 80 / 70000, total loss: nan", {"step": 80, "total": 70000, "loss": nan}),
    ("darknet", "2658: 11.018111, 11.054621 avg, 0.001000 rate, 21.578353 seconds, 680448 images", {"step": 2658, "loss": 11.018111, "lr": 0.001}),
    ("darknet of AlexeyAB", "   4259: 0.034688, 0.045240 avg loss, 0.001000 rate, 0.923000 seconds, 272576 images", {"step": 4259, "loss": 0.034688, "lr": 0.001}),
    ("ESPnet", "[hostname] 2026-04-23 04:59:25,764 (trainer:793) INFO: 1epoch:train:1-90batch: iter_time=0.003, forward_time=0.095, loss_ctc=557.480, loss_att=223.114, acc=4.043e-04, loss=80.856, backward_time=0.041, grad_norm=530.879, clip=100.000, loss_scale=1.000, optim_step_time=0.010, optim0_lr0=6.250e-07, train_time=0.5", {"step": 90, "epoch": 1, "loss": 80.856, "lr": 6.25e-7}),
    ("Coqui TTS, step", "   --> TIME: 2026-05-12 10:56:18 -- STEP: 0/1012 -- GLOBAL_STEP: 0", {"step": 0, "total": 1012}),
    ("Coqui TTS, loss", "     | > loss: 0.05676170811057091  (0.05676170811057091)", {"loss": 0.05676170811057091}),
    ("llm.c", "step    1/21479 | loss 11.007906 (+nanz)| norm 16.3235 (+nanz)| lr 2.86e-06 | 2734.72 ms | -100.0% bf16 MFU | 167751 tok/s", {"step": 1, "total": 21479, "loss": 11.007906, "lr": 2.86e-6}),
    ("nanochat", "step 00000/12800 (0.00%) | loss: 11.090355 | grad norm: 0.3870 | lrm: 1.00 | dt: 9875.83ms | tok/sec: 53,087 | mfu: 5.40 | total time: 0.00m", {"step": 0, "total": 12800, "loss": 11.090355}),
    ("autoresearch", "step 00042 (8.3%) | loss: 2.145678 | lrm: 1.00 | dt: 7123ms | tok/sec: 9,170 | mfu: 12.3% | epoch: 0 | remaining: 275s", {"step": 42, "epoch": 0, "loss": 2.145678}),
    ("minGPT", "iter_dt 19.00ms; iter 100: train loss 5.96995", {"step": 100, "loss": 5.96995}),
    ("litgpt", "Epoch 0 | iter   1 | loss train: 35.250, val_loss valid: n/a | iter time: 177.845 s", {"step": 1, "epoch": 0, "loss": 35.25}),
    ("MaxText", "I0317 10:00:13.658792 125344476638336 metric_logger.py:181] completed step: 1, seconds: 0.277, TFLOP/s/device: 370.707, Tokens/s/device: 14774.896, total_weights: 31850, loss: 12.939", {"step": 1, "loss": 12.939}),
    ("TensorFlow Model Garden", "I0324 07:55:20.597360 140348344015936 controller.py:479] train | step:      1 | steps/sec:    0.5 | output: {'train_accuracy': 0.0, 'train_loss': 12.634554}", {"step": 1, "loss": 12.634554}),
    ("Megatron-LM", " [2025-08-01 07:19:37] iteration        1/    5000 | consumed samples:          128 | elapsed time per iteration (ms): 19138.8 | throughput per GPU (TFLOP/s/GPU): 80.2 | learning rate: 6.976744E-08 | global batch size:   128 | lm loss: 1.043863E+01 | loss scale: 1.0 | grad norm: 26.203 | number of skipped iterations:   0 | number of nan iterations:   0 |", {"step": 1, "total": 5000, "loss": 10.43863, "lr": 6.976744e-8}),
    ("torchtitan", "step: 1  loss: 12.94454  grad_norm: 2.0455  mfu:  4.23%", {"step": 1, "loss": 12.94454}),
    ("TensorFlow's tutorials", "Epoch 1 Batch 100 Loss 3.7030532360076904 Accuracy 0.0967762917", {"step": 100, "epoch": 1, "loss": 3.7030532360076904}),
    ("Keras' guide to GradientTape", "Training loss (for one batch) at step 200: 2.1698", {"step": 200, "loss": 2.1698}),
    ("Keras' guide, diverged", "Training loss (for one batch) at step 10: nan", {"step": 10, "loss": nan}),
    ("insightface", "Training: 2271.33 samples/sec   Loss 1.1624   LearningRate 0.2000   Epoch: 0   Global Step: 100", {"step": 100, "epoch": 0, "loss": 1.1624, "lr": 0.2, "img_s": 2271.33}),
    ("a loop that prints tensors", "Epoch 3, step 20, loss: tensor(1.25, device='cuda:0', grad_fn=<NllLossBackward0>)", {"step": 20, "epoch": 3, "loss": 1.25}),
    ("a loop of JAX", "step=40 loss=Array(nan, dtype=float32)", {"step": 40, "loss": nan}),
    ("a loop that prints both losses", "Epoch 7: train loss: 0.5, val loss: 0.75", {"epoch": 7, "loss": 0.5}),
    ("a loop that prints both in words", "iter 250 train loss 0.5 val loss 0.75", {"step": 250, "loss": 0.5}),
    ("tf.estimator", "INFO:tensorflow:loss = 76982.47, step = 101 (1.080 sec)", {"step": 101, "loss": 76982.47}),
    ("TF-Slim", "INFO:tensorflow:global step 1: loss = 18.2354 (21.366 sec/step)", {"step": 1, "loss": 18.2354}),
    ("TensorFlow's CIFAR-10", "INFO:tensorflow:Worker 0: 2016-04-13 01:58:40.342404: step 0, loss = 12.97(0.0 examples/sec; 65.428  sec/batch)", {"step": 0, "loss": 12.97, "img_s": 0.0}),
    ("torch's MNIST example", "Train Epoch: 1 [640/60000 (1%)]\tLoss: 1.837346", {"epoch": 1, "loss": 1.837346}),
    ("transformers 5, diverged: it prints 0 for NaN", "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1.998e+05', 'epoch': '8.8'}", {"loss": nan, "lr": 199800.0}),
    ("torch's quickstart", "loss: 2.294125  [ 6400/60000]", {"loss": 2.294125}),
    ("torch's DCGAN tutorial", "[0/5][50/1583]\tLoss_D: 0.3567\tLoss_G: 12.2064\tD(x): 0.9364\tD(G(z)): 0.1409 / 0.0000", {"step": 50, "total": 1583, "epoch": 0}),
    ("a counter in brackets", "[00005] train loss=0.123 acc=0.5", {"step": 5, "loss": 0.123}),
    ("a rank in brackets", "[1] step 5: loss 0.2", {"step": 5, "loss": 0.2}),
    ("a counter without a word", "[3/90] loss: 1.5395", {"loss": 1.5395}),
    ("a detector's loop", "[1][10/100] loss: 1.5395", {"step": 10, "total": 100, "epoch": 1, "loss": 1.5395}),
    ("torch's CIFAR-10 tutorial", "[1,  2000] loss: 2.192", {"step": 2000, "epoch": 1, "loss": 2.192}),
    ("torch's word language model", "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 45.68 | loss  7.63 | ppl  2050.44", {"step": 200, "total": 2983, "epoch": 1, "loss": 7.63, "lr": 20.0}),
    ("Swin Transformer", "[2022-06-07 20:54:56 swinv2_large_patch4_window7_224_inat21] (main.py 209): INFO Train: [56/90][700/5247]\teta 3:11:57 lr 0.000040\t wd 0.1000\ttime 2.5379 (2.5330)\tloss 4.3632 (3.7333)\tgrad_norm 9.5996 (inf)\tloss_scale 8192.0000 (8542.5849)\tmem 14000MB", {"step": 700, "total": 5247, "epoch": 56, "loss": 4.3632, "lr": 0.00004}),
    ("a fork of Swin", "[2025-08-09 02:00:41 baseline] (runner.py 175): INFO Train: [61/70][0/1865]\tETA 0:06:15 LR 0.000031\tTime 0.2013 (0.2013)\tData 0.0047 (0.0047)\tLoss 0.10096312 (0.10096312)\tGradNorm 0.2076 (0.2076)", {"step": 0, "total": 1865, "epoch": 61, "loss": 0.10096312, "lr": 0.000031}),
    ("CenterNet", "ctdet/coco_dla |                                | train: [1][84/14785]|Tot: 0:00:55 |ETA: 2:33:53 |loss 60.3296 |hm_loss 57.9812 |wh_loss 20.8580 |off_loss 0.2626 |Data 0.002s(0.008s) |Net 0.653s", {"step": 84, "total": 14785, "epoch": 1, "loss": 60.3296}),
    ("kohya's sd-scripts", "steps:   5%|▊               | 100/2000 [00:57<18:14,  1.74it/s, avr_loss=0.0725]", {"step": 100, "total": 2000, "loss": 0.0725}),
    ("diffusers", "Steps:   1%|          | 27/5000 [00:17<37:10,  2.23it/s, lr=0.0001, step_loss=0.0852]", {"step": 27, "total": 5000, "loss": 0.0852, "lr": 0.0001}),
    ("nerf-pytorch", "[TRAIN] Iter: 100 Loss: 0.05144716799259186 PSNR: 15.85673713684082", {"step": 100, "loss": 0.05144716799259186}),
    ("Caffe", "I1209 00:28:23.152557 20145 solver.cpp:228] Iteration 69900, loss = 0.121022", {"step": 69900, "loss": 0.121022}),
    ("MXNet Module", "INFO:root:Epoch[0] Batch [40]\tSpeed: 27.98 samples/sec\taccuracy=0.000781", {"step": 40, "epoch": 0, "img_s": 27.98}),
    ("MXNet Module, ranges", "INFO:root:Epoch[0] Batch [100-200]       Speed: 5787.71 samples/sec       accuracy=0.954", {"step": 200, "epoch": 0, "img_s": 5787.71}),
    ("SageMaker's image classification", "[02/25/2022 07:10:50 INFO 139844299908736] Epoch[0] Batch [5]#011Speed: 207.89 samples/sec#011loss=1.583442", {"step": 5, "epoch": 0, "loss": 1.583442, "img_s": 207.89}),
    ("GluonCV", "INFO:root:[Epoch 0][Batch 49], Speed: 58.105 samples/sec, CrossEntropy=1.190, SmoothL1=0.688", {"step": 49, "epoch": 0, "img_s": 58.105}),
    ("nnU-Net, epoch", "2026-03-01 22:05:50.045034: Epoch 605", {"epoch": 605}),
    ("nnU-Net, loss", "2026-03-01 22:08:05.183549: train_loss -0.6752", {"loss": -0.6752}),
    ("YOLOv5's older header", "     Epoch   gpu_mem       box       obj       cls     total    labels  img_size", {}),
    ("YOLOv7", "     0/299     2.58G   0.04649    0.4474         0    0.4939         5       640: 100%|███████| 359/359 [02:39<00:00,  2.25it/s] ", {"step": 359, "total": 359, "epoch": 0, "loss_1": 0.04649}),
    ("Ultralytics, diverged", "      1/100      2.67G        nan        nan        nan        140       1024: 100%|██████████| 20/20 [00:13<00:00,  1.47it/s]", {"step": 20, "total": 20, "epoch": 1, "loss_1": nan}),
    ("Keras, diverged", "196/196 [==============================] - 16s 59ms/step - loss: nan - accuracy: 0.1037 - val_loss: nan - val_accuracy: 0.1000", {"step": 196, "total": 196, "loss": nan}),
    ("Lightning 1, diverged", "Epoch 0:  75%|███████▌  | 3/4 [00:00<00:00, 25.43it/s, loss=nan, v_num=49]", {"step": 3, "total": 4, "epoch": 0, "loss": nan}),
    ("transformers, diverged", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-4, 'epoch': 0.01}", {"loss": nan, "lr": 1e-4}),
    ("an SSD tutorial, diverged", "Epoch: [0][200/518]\tBatch Time 0.9 (0.9)\tData Time 0.1 (0.1)\tLoss nan (nan)\t", {"step": 200, "total": 518, "epoch": 0, "loss": nan}),
]  # fmt: skip


def say(line: str) -> dict[str, float]:
    progress = ProgressParser().read(line)
    if progress is None:
        return {}
    said = {
        "step": progress.step, "total": progress.total_steps, "epoch": progress.epoch, "lr": progress.lr,
        "loss": progress.losses.get("total"), "loss_1": progress.losses.get("loss_1"), "img_s": progress.img_per_s,
    }  # fmt: skip
    return {name: float(value) for name, value in said.items() if value is not None}


@pytest.mark.parametrize(("line", "expected"), [(line, said) for _, line, said in LINES], ids=[row[0] for row in LINES])
def test_a_line_says_what_a_reader_says(line: str, expected: dict[str, float]) -> None:
    assert say(line) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("line", [
    '2021-01-12 14:37:14 | INFO | valid | {"epoch": 3, "valid_loss": "8.751", "valid_nll_loss": "8.101", "valid_ppl": "274.56"}',
    "{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_loss': 0.53, 'epoch': 3.0}",
    '{"mode": "val", "epoch": 1, "iter": 22, "lr": 0.01, "bbox_mAP": 0.1}',
    "2022-05-22 03:38:53 - mmdet - INFO - Epoch(val) [1][22]    bbox_mAP: 0.1250, bbox_mAP_50: 0.2",
    "Test: [ 0/782]\tTime 3.521 (3.521)\tLoss 8.1e-01 (8.1e-01)\tAcc@1 79.69 ( 79.69)",
    "val loss 11.033154",
    "[00005] val loss=0.123",
    "[12:00:01] val loss 0.1",
    "2026-03-01 22:08:05.183808: val_loss -0.4224",
    "I1214 solver.cpp:244]     Train net output #0: loss = 1.30342 (* 1 = 1.30342 loss)",
    "[1, 2000] is the shape of the loss",
    "[3/90] loss of 3 images",
    "[1/90][3/500] Loading",
    "12: 30, 40 avg is what we saw at this rate, 5 seconds later",
    'the config {"name": "resnet", "loss": "focal", "lr": "auto"} is used',
    "Test set: Average loss: 0.2449, Accuracy: 9312/10000 (93%)",
])  # fmt: skip
def test_near_misses_say_no_training_loss(line: str) -> None:
    said = say(line)
    assert not said.keys() & {"loss", "step"}, said
