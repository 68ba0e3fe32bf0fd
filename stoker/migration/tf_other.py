"""The fields of a pipeline.config that no reader asks for, with the reason why they have no counterpart, or need none.

Patterns are matched with paths without indices, `*` also matches dots; the first that matches counts. A field that
none matches is reported as unknown: misspelled, or newer than the protos of tensorflow/models that were read
(object_detection/protos, release 2.8).
"""

import re
from fnmatch import fnmatchcase

from stoker.migration.fields import FieldAccount, Status
from stoker.migration.text_format import Message

SAME: Status = "exact"
NOT: Status = "not carried"
_LAYERS = "the layers of the model are those of its paper (docs/models.md)"
_LOADER = "stoker's loader tunes workers and prefetching itself"
_DRAWING = "TensorBoard gets some images with ground truth and detections; `stoker predict` draws all"
_MASKS = "stoker trains boxes only, no masks"
_KEYPOINTS = "stoker trains boxes only, no keypoints"
_HOW = "how TensorFlow computes it; the result is the same"
_CHECKPOINT = "about the TensorFlow checkpoint, which cannot be loaded"
_LOSS = "the losses are those of the model's paper"
_HEADS = "CenterNet's heads and losses do not exist here"

OTHER_FIELDS: tuple[tuple[str, Status, str], ...] = (
    ("[[]*", NOT, "an extension of the API"),
    ("*.[[]*", NOT, "an extension of the API"),
    ("graph_rewriter*", NOT, "no quantization-aware training; the ONNX file of `stoker export` can be quantized"),
    # train_config
    *((f"train_config.{name}", NOT, _CHECKPOINT) for name in (
        "fine_tune_checkpoint_type", "fine_tune_checkpoint_version", "from_detection_checkpoint",
        "load_all_detection_checkpoint_vars", "run_fine_tune_checkpoint_dummy_computation",
    )),
    *((f"train_config.{name}", NOT, "devices train in step: `stoker train --devices N`") for name in (
        "sync_replicas", "replicas_to_aggregate", "startup_delay_steps",
    )),
    ("train_config.*queue*", NOT, _LOADER),
    ("train_config.keep_checkpoint_every_n_hours", NOT, "the last two checkpoints and the best weights are kept"),
    ("train_config.max_number_of_boxes", NOT, "all boxes of an image are used"),
    ("train_config.unpad_groundtruth_tensors", SAME, _HOW),
    ("train_config.freeze_variables", NOT, "stages of the backbone are frozen: --trainable-backbone-layers"),
    ("train_config.update_trainable_variables", NOT, "stages of the backbone are frozen: --trainable-backbone-layers"),
    ("train_config.bias_grad_multiplier", NOT, "biases have the learning rate of the weights"),
    ("train_config.merge_multiple_label_boxes", NOT, "a box has one class; boxes with equal corners may differ in it"),
    ("train_config.use_multiclass_scores", NOT, "a box has one class, not scores of several"),
    ("train_config.retain_original_images", SAME, _HOW),
    ("train_config.summarize_gradients", NOT, "steps.jsonl and TensorBoard have the norm of all gradients"),
    *((name, SAME, "with the defaults of the API") for name in (
        "train_config", "train_config.optimizer", "eval_config", "*_input_reader",
    )),
    ("train_config.optimizer.*_optimizer", SAME, "with the defaults of the API"),
    ("train_config.optimizer.*_optimizer.learning_rate", SAME, "with the defaults of the API"),
    ("train_config.optimizer.*_optimizer.learning_rate.*_learning_rate", SAME, "with the defaults of the API"),
    ("train_config.data_augmentation_options", SAME, "an empty step"),
    # readers
    *((f"*_input_reader.{name}", NOT, _LOADER) for name in (
        "shuffle_buffer_size", "filenames_shuffle_buffer_size", "num_readers", "num_parallel_batches",
        "num_prefetch_batches", "queue_capacity", "min_after_dequeue", "read_block_length", "prefetch_size",
        "num_parallel_map_calls", "drop_remainder",
    )),
    ("*_input_reader.external_input_reader*", NOT, "records of one's own format; stoker reads those of the API"),
    ("*_input_reader.tf_record_input_reader", NOT, "without a path"),
    ("*_input_reader.max_number_of_boxes", NOT, "all boxes of an image are used"),
    ("*_input_reader.num_epochs", NOT, "training ends at its length; an evaluation is one pass"),
    ("*_input_reader.name", NOT, "only a name"),
    ("*_input_reader.include_source_id", SAME, "image ids are read if they are whole numbers"),
    ("*_input_reader.num_additional_channels", NOT, "images have three channels"),
    ("*_input_reader.*mask*", NOT, _MASKS),
    ("*_input_reader.*keypoint*", NOT, _KEYPOINTS),
    ("*_input_reader.load_*", NOT, "stoker reads boxes and classes only"),
    ("*_input_reader.frame_index", NOT, "images, not sequences"),
    ("*_input_reader.sample_from_datasets_weights", NOT, "every image counts the same"),
    ("*_input_reader.expand_labels_hierarchy", NOT, "a box has one class"),
    # eval_config
    ("eval_config.batch_size", NOT, "an evaluation takes batches of the size of training"),
    ("eval_config.num_examples", NOT, "the whole validation split is evaluated"),
    ("eval_config.max_evals", NOT, "evaluations are part of the training: --eval-every"),
    ("eval_config.eval_interval_secs", NOT, "at most once per epoch, for a tenth of the time: --eval-every 5min"),
    *((f"eval_config.{name}", NOT, _DRAWING) for name in (
        "num_visualizations", "visualization_export_dir", "min_score_threshold", "max_num_boxes_to_visualize",
        "skip_scores", "skip_labels", "visualize_groundtruth_boxes", "groundtruth_box_visualization_color",
        "keep_image_id_for_visualization_export", "retain_original_image*",
    )),
    ("eval_config.include_metrics_per_category", SAME, "AP of each class is always reported"),
    ("eval_config.all_metrics_per_category", NOT, "AP of each class, without the other metrics"),
    ("eval_config.recall_*_bound", NOT, "COCO's metrics average over the whole range of recall"),
    ("eval_config.*keypoint*", NOT, _KEYPOINTS),
    ("eval_config.eval_instance_masks", NOT, _MASKS),
    *((f"eval_config.{name}", NOT, "an evaluation runs the whole validation split through the model") for name in (
        "save_graph", "eval_master", "export_path", "ignore_groundtruth", "force_no_resize", "use_dummy_loss_in_eval",
        "skip_predictions_for_unlabeled_class", "image_classes_field_map_empty_to_ones", "parameterized_metric*",
        "super_categories*",
    )),
    # model
    ("model.*.mask_head_config*", NOT, _MASKS),
    ("model.*.use_matmul_gather*", SAME, _HOW),
    ("model.*use_static_*", SAME, _HOW),
    ("model.*.inplace_batchnorm_update", SAME, _HOW),
    ("model.*.post_processing*", NOT, "NMS within each class at the model's threshold"),
    ("model.*.second_stage_post_processing*", NOT, "NMS within each class at the model's threshold"),
    ("model.*.*nms_in_first_stage", SAME, _HOW),
    ("model.*.return_raw_detections_during_predict", NOT, "detections are those after NMS"),
    ("model.*.similarity_calculator.iou_similarity", SAME, "IoU"),
    ("model.*.similarity_calculator*", NOT, "anchors are assigned by their IoU with the boxes"),
    ("model.ssd.encode_background_as_zeros", SAME, "targets are as the model's loss wants them"),
    ("model.ssd.add_background_class", SAME, "targets are as the model's loss wants them"),
    ("model.ssd.explicit_background_class", SAME, "targets are as the model's loss wants them"),
    ("model.ssd.negative_class_weight", NOT, _LOSS),
    ("model.ssd.use_confidences_as_targets", NOT, "a box counts fully"),
    ("model.ssd.implicit_example_weight", NOT, "a box counts fully"),
    ("model.ssd.loss*", NOT, _LOSS),
    ("model.ssd.matcher*", NOT, "anchors are assigned by IoU thresholds"),
    ("model.ssd.feature_extractor*", NOT, _LAYERS),
    ("model.ssd.box_predictor*", NOT, _LAYERS),
    ("model.ssd.anchor_generator*", NOT, "the model's own anchors"),
    ("model.*.image_resizer*", NOT, "the input size is fixed; images are RGB"),
    ("model.faster_rcnn.second_stage_mask_prediction_loss_weight", NOT, _MASKS),
    ("model.faster_rcnn.resize_masks", NOT, _MASKS),
    ("model.faster_rcnn.*mask*", NOT, _MASKS),
    ("model.faster_rcnn.*keypoint*", NOT, _KEYPOINTS),
    ("model.faster_rcnn.context_config*", NOT, "stoker has no Context R-CNN: an image is judged alone"),
    ("model.faster_rcnn.second_stage_classification_loss*", NOT, _LOSS),
    ("model.faster_rcnn.hard_example_miner*", NOT, _LOSS),
    ("model.faster_rcnn.feature_extractor*", NOT, _LAYERS),
    ("model.faster_rcnn.first_stage_anchor_generator*", NOT, "the model's own anchors"),
    ("model.faster_rcnn.second_stage_box_predictor*", NOT, _LAYERS),
    ("model.faster_rcnn.first_stage_box_predictor*", NOT, _LAYERS),
    ("model.faster_rcnn.first_stage_atrous_rate", NOT, _LAYERS),
    ("model.faster_rcnn.initial_crop_size", NOT, "RoIAlign to 7 x 7, as in torchvision"),
    ("model.faster_rcnn.maxpool_*", NOT, "RoIAlign to 7 x 7, as in torchvision"),
    ("model.faster_rcnn.use_matmul_crop_and_resize", SAME, _HOW),
    ("model.faster_rcnn.clip_anchors_to_image", NOT, "anchors reach outside; proposals are clipped"),
    ("model.faster_rcnn.output_final_box_*", NOT, "detections have no features"),
    ("model.center_net.*keypoint*", NOT, _KEYPOINTS),
    ("model.center_net.*mask*", NOT, _MASKS),
    ("model.center_net.deepmac*", NOT, _MASKS),
    ("model.center_net.densepose*", NOT, _KEYPOINTS),
    ("model.center_net.track*", NOT, "images are judged alone, without tracks"),
    ("model.center_net.temporal*", NOT, "images are judged alone, without tracks"),
    ("model.center_net.feature_extractor*", NOT, _LAYERS),
    ("model.center_net.object_detection_task*", NOT, _HEADS),
    ("model.center_net.object_center_params*", NOT, _HEADS),
    ("model.center_net.post_processing*", NOT, "NMS within each class at the model's threshold"),
    ("model.center_net.use_depthwise", NOT, _LAYERS),
    ("model.center_net.output_prediction_dict", NOT, "detections are boxes, scores and labels"),
    ("model.center_net.compute_heatmap_sparse", SAME, _HOW),
)  # fmt: skip
UNKNOWN = "no field of the API that stoker knows: misspelled, or newer than release 2.8"
_INDEX = re.compile(r"\[\d+\]")


def read_eval_config(account: FieldAccount, config: Message) -> None:
    """Metrics, and which weights are evaluated."""
    if config.has("metrics_set"):
        metrics = set(config.texts("metrics_set"))
        if metrics <= {"coco_detection_metrics"}:
            account.exact(config, "metrics_set", note="the twelve COCO metrics")
        else:
            note = "the twelve COCO metrics of boxes; AP50 is the Pascal VOC criterion"
            account.substitute(config, "metrics_set", {}, note)
    if config.has("use_moving_averages"):
        averaged = account.settings.get("ema_decay", 0) > 0
        if config.flag("use_moving_averages", False) is averaged:
            account.exact(config, "use_moving_averages")
        else:
            what = "the averaged weights are evaluated and saved" if averaged else "there are no averaged weights"
            account.substitute(config, "use_moving_averages", {}, what)


def read_rest(account: FieldAccount, pipeline: Message) -> None:
    """A row for every field that has none yet."""
    for owner, name in pipeline.leaves():
        if not account.is_open(owner, name):
            continue
        path = _INDEX.sub("", owner.join(name) if name else owner.path)
        status, reason = next(
            ((status, reason) for pattern, status, reason in OTHER_FIELDS if fnmatchcase(path, pattern)),
            (None, UNKNOWN),
        )
        if status == "exact":
            account.exact(owner, name, note=reason)
        else:
            account.drop(owner, name, reason, is_unknown=status is None)
            if status is None:
                line = owner.lines.get(name, owner.line)
                account.trap("unknown-field", line, f"{path}: {reason}; TensorFlow would refuse the file")
