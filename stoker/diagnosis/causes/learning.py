"""Causes of the reason "architecture and hyper-parameters", and of divergence: time that teaches little. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

STABILITY_SOURCE = "training/stability.py has the thresholds of a run of ours; of others the limits below"
MEDIAN_WINDOW = Threshold(
    8, "windows whose median is a point of the loss's course (our judgment: single windows decide nothing)"
)

CAUSES = (
    Cause(
        id="evaluation_heavy",
        title="Evaluation takes a large part of the run",
        reason="architecture and hyper-parameters",
        symptom="training pauses for long and often",
        required_records=("steps.jsonl: phases",),
        warning_threshold=0.10,
        critical_threshold=0.35,
        metric="eval, share of the device time after the start; of the evaluations that are not the last one, where "
        "their number is known",
        source="our judgment: the defaults (training/defaults/derive.py) are laid out for less than a tenth",
        thresholds={"least_s": Threshold(1.0, "seconds of evaluation below which nothing is said (our judgment)")},
        confidence=0.9,
        fix="Evaluate less often, or on fewer pictures",
        command="--eval-every",
        config_patch={"eval_every": "2ep"},
    ),
    Cause(
        id="lr_too_high",
        title="The learning rate looks too high",
        reason="architecture and hyper-parameters",
        symptom="the loss rises after the warm-up, or the gradient grows, or many steps are skipped",
        required_records=("events.jsonl: lr_too_high, or steps.jsonl: losses.total",),
        warning_threshold=1,
        metric="stretches of the run that looked so",
        source=STABILITY_SOURCE,
        thresholds={
            "rise": Threshold(
                1.5, "growth of the loss above its lowest point that is too much (training/stability.py, RISE)"
            ),
            "sigmas": Threshold(4.0, "standard deviations of the log-loss by which it must have risen (our judgment)"),
            "group": MEDIAN_WINDOW,
            "least_windows": Threshold(6, "windows with a loss (our judgment)"),
            "above_first": Threshold(3.0, "times the first loss that is too much (our judgment)"),
            "absurd": Threshold(
                1e6, "loss that is far beyond any beginning: random logits cost a few units a picture (our judgment)"
            ),
            "jump": Threshold(
                10.0,
                "times the lowest loss before it, and above_first times the first, of a window that jumped; two such "
                "windows are no accident, nor is one after which the loss stays above its beginning (our judgment)",
            ),
            "jumps": Threshold(2, "such windows"),
            "own_windows": Threshold(
                32, "windows from which a run of ours judges itself (training/stability.py, twice GROUP)"
            ),
            "blew_up": Threshold(
                1e4, "largest loss over the newest from which it blew up: no healthy one starts there"
            ),
            "learns": Threshold(0.7, "newest third over the middle one below which it falls (our judgment)"),
        },
        confidence=0.75,
        fix="A third of the rate, or a longer --warmup-steps",
        external_fix="A third of the learning rate, or a longer warm-up",
        command="--lr",
    ),
    Cause(
        id="lr_too_low",
        title="The learning rate looks too low: nothing moves",
        reason="architecture and hyper-parameters",
        symptom="a fifth of the run is over, and loss and gradient are what they were at its beginning",
        required_records=("events.jsonl: lr_too_low, or steps.jsonl: losses.total",),
        info_threshold=1,
        warning_threshold=2,
        metric="2: an event of the run said so, or loss and gradient, or the loss at a tiny rate, stand still; "
        "1: only "
        "the loss does, as it also does where there is nothing to learn",
        source=STABILITY_SOURCE,
        thresholds={
            "moved": Threshold(
                0.05, "share by which the median loss of the last third may differ from that of the first"
            ),
            "norm_moved": Threshold(0.09, "the same of the gradient's norm, which is noisier (our judgment)"),
            "from_step": Threshold(
                100, "step before which its loss must be known, so that it is the beginning (our judgment)"
            ),
            "tiny": Threshold(
                1e-6,
                "rate that is tiny with any optimizer: Adam moves a weight by that much a step, SGD less "
                "(Kingma and Ba 2014)",
            ),
            "least_windows": Threshold(6, "windows with a loss from the job's beginning on (our judgment)"),
            "stands_windows": Threshold(24, "windows with a gradient, for that to say something (our judgment)"),
            "least_steps": Threshold(20, "steps in them (our judgment)"),
        },
        confidence=0.6,
        fix="Ten times the rate, unless the weights had learnt these pictures before",
        command="--lr",
    ),
    Cause(
        id="overfitting",
        title="The model learns its pictures by heart",
        reason="architecture and hyper-parameters",
        symptom="AP on the validation split falls while the training loss goes on falling",
        required_records=("events.jsonl: evaluated with data.metrics.ap", "steps.jsonl: losses.total"),
        warning_threshold=0.15,
        critical_threshold=0.40,
        metric="fall of AP since its best, share of the best",
        source=HEURISTIC + ": beyond what AP varies by itself between evaluations of a few hundred pictures",
        thresholds={
            "least_fall": Threshold(0.02, "points of AP (of 1) that it must have fallen (our judgment)"),
            "evaluations": Threshold(2, "evaluations since the best one (our judgment: one may be an accident)"),
            "sigmas": Threshold(
                2.0, "standard errors of a share of as many objects as there are true boxes, that it must have fallen"
            ),
        },
        confidence=0.7,
        fix="--patience 3 ends such a run; more pictures or more augmentation (--mosaic 0.5 --scale-jitter-prob 0.7) help; "
        "best.safetensors has the best weights",
        external_fix="Stop at the best evaluation; more pictures or more augmentation",
        command="--patience 3",
        config_patch={"patience": 3},
    ),
    Cause(
        id="augmentation_heavy",
        title="The augmentation changes pictures beyond recognition",
        reason="architecture and hyper-parameters",
        symptom="`stoker data preview` shows pictures that nobody would label; the loss stays high",
        required_records=("config.toml: data",),
        info_threshold=1,
        warning_threshold=2,
        metric="settings beyond their limit",
        source="the strongest that published recipes use; see the limits",
        thresholds={
            "brightness": Threshold(0.5, "SSD (Liu et al. 2016) has 0.125"),
            "contrast": Threshold(0.6, "SSD has 0.5"),
            "saturation": Threshold(0.8, "SSD has 0.5, YOLOv8 0.7"),
            "hue": Threshold(0.1, "SSD has 0.05, YOLOv8 0.015"),
            "scale_range": Threshold(
                20.0, "largest over smallest scale: large-scale jittering (Ghiasi et al. 2021) has 0.1 to 2"
            ),
            "mosaic": Threshold(0.5, "in training shorter than `mosaic_epochs`"),
            "mosaic_epochs": Threshold(24, "YOLOX and YOLOv8 train 100 to 300 epochs with it; a 2x schedule is 24"),
        },
        confidence=0.5,
        fix="The recipe's own values (leave the flags out), and look at `stoker data preview`",
        command="--augment default",
    ),
    Cause(
        id="anchors_miss_boxes",
        title="The anchors do not fit the boxes of the data",
        reason="architecture and hyper-parameters",
        symptom="recall stays low for some sizes; few anchors are positive",
        required_records=("events.jsonl: note with data.anchor_coverage",),
        warning_threshold=0.60,
        critical_threshold=0.25,
        lower_is_worse=True,
        metric="share of the boxes that some anchor laid on their centre meets with an IoU of 0.5",
        source="our judgment: RetinaNet's anchors meet more than nine tenths of COCO's boxes so (`stoker data stats`)",
        thresholds={"boxes": Threshold(50, "boxes, fewer say nothing (our judgment)")},
        confidence=0.7,
        fix="The sizes that `stoker data stats` proposes",
        command="--anchor-sizes",
    ),
    Cause(
        id="scratch_on_small_dataset",
        title="Training from random weights on few pictures",
        reason="architecture and hyper-parameters",
        symptom="AP stays low for long, though weights for this model exist",
        required_records=("config.toml: model.weights", "events.jsonl: note with data.pictures, pretrained"),
        warning_threshold=10_000,
        lower_is_worse=True,
        metric="training pictures, where --weights none was asked for and there are weights for the model",
        source="He et al. 2018, Rethinking ImageNet Pre-training: from scratch is no worse with 10,000 COCO pictures, "
        "and breaks down below",
        confidence=0.7,
        fix="Start from weights: leave --weights out",
        command="--weights coco",
        config_patch={"weights": "coco"},
    ),
    Cause(
        id="freezing_mismatch",
        title="The weights, or how much of them is trained, do not suit",
        reason="architecture and hyper-parameters",
        symptom="AP stays near nothing, or far below what the model can; the loss falls a little and stands",
        required_records=("config.toml: model.weights, norm, trainable_stages",),
        warning_threshold=1,
        metric="settings that contradict the weights: random layers that are frozen, frozen statistics of random "
        "layers",
        source="by arithmetic: what is random and not trained never learns",
        confidence=0.9,
        fix="With --weights none: --backbone-norm bn --trainable-backbone-layers 5; or start from weights",
        command="--backbone-norm bn --trainable-backbone-layers 5",
        config_patch={"backbone_norm": "bn", "trainable_backbone_layers": 5},
    ),
    Cause(
        id="tensor_cores_unused",
        title="The tensor cores do nothing",
        reason="architecture and hyper-parameters",
        symptom="the GPU is busy and slow: arithmetic is fp32 without TF32",
        required_records=("devices.jsonl: gpus.tensor_active, sm_active; or traces.jsonl: tensor_core_share",),
        warning_threshold=0.02,
        lower_is_worse=True,
        metric="share of the time, while the multiprocessors work, in which the tensor cores do; or, of a "
        "trace, share of "
        "the kernels' time in kernels of theirs",
        source="our judgment: convolutions in bf16 keep them busy more than a tenth of the time; fp32 not at all",
        thresholds={
            "sm_active": Threshold(0.3, "mean share of the multiprocessors with work, below which it is no proof")
        },
        confidence=0.75,
        fix="--precision bf16; of a PyTorch job torch.autocast, or torch.set_float32_matmul_precision('high') for TF32",
        external_fix="torch.autocast with bf16, or torch.set_float32_matmul_precision('high') for TF32; of Keras "
        "mixed_precision.set_global_policy('mixed_bfloat16')",
        command="--precision bf16",
        config_patch={"precision": "bf16"},
    ),
    Cause(
        id="steps_skipped",
        title="Steps were thrown away because gradients were not finite",
        reason="dies: divergence",
        symptom="the loss jumps; pictures are seen and nothing is learnt from them",
        required_records=("steps.jsonl: skipped",),
        warning_threshold=0.005,
        critical_threshold=0.10,
        metric="skipped, share of all steps",
        source="ten times what fp16 loss scaling skips by itself (torch.amp.GradScaler grows every 2,000 steps)",
        confidence=0.9,
        fix="A lower --lr, a longer --warmup-steps, --clip-grad-norm 1, or --precision bf16 or fp32",
        external_fix="A lower learning rate, a longer warm-up, gradient clipping, or bf16 or fp32 instead of fp16",
        command="--lr",
    ),
    Cause(
        id="non_finite_loss",
        title="The loss is not a number any more",
        reason="dies: divergence",
        symptom="the job goes on, its loss is NaN, and it learns nothing from there on",
        required_records=("events.jsonl: warning with data.not_finite, or steps.jsonl: losses that end",),
        critical_threshold=1,
        metric="1: it became NaN or infinite and did not come back",
        source="any is one too many: all that follows is lost",
        thresholds={
            "windows": Threshold(3, "windows of steps without a finite loss, after some that had one (our judgment)")
        },
        supersedes=("lr_too_high", "steps_skipped", "loss_spikes"),
        confidence=0.9,
        fix="A lower learning rate, a longer warm-up, gradient clipping; then look for boxes without area",
        command="--lr",
    ),
    Cause(
        id="rolled_back_lower_lr",
        title="Training diverged and went on at a lower rate",
        reason="dies: divergence",
        symptom="the step number jumps back once or twice, and the rate is a third from there on",
        required_records=("events.jsonl: slowed",),
        warning_threshold=1,
        critical_threshold=2,
        metric="times that the run went back because its gradients stayed non-finite",
        source="any is one too many: what was learnt between is lost, and the rest is learnt more slowly",
        confidence=0.95,
        fix="Start the next run at the rate that this one came through with, or below; where it still diverged, look "
        "for broken boxes with `stoker data check`",
        command="--lr",
    ),
    Cause(
        id="loss_spikes",
        title="The loss jumped",
        reason="dies: divergence",
        symptom="a curve that falls, and in between is far above itself for a while",
        required_records=("events.jsonl: loss_spike",),
        warning_threshold=2,
        critical_threshold=10,
        metric="jumps to twice the running median and eight standard deviations above it",
        source="our judgment: training gets over a single jump by itself; training/stability.py has what a jump is",
        confidence=0.8,
        fix="A lower --lr, a longer --warmup-steps or a smaller --clip-grad-norm; jumps at the same pictures in every epoch: look at "
        "their boxes",
        external_fix="A lower learning rate, a longer warm-up or a tighter gradient clipping; jumps at the same "
        "pictures in every epoch: look at their boxes",
        command="--lr",
    ),
)
