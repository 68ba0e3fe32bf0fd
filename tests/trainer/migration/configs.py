"""Pipelines of the TensorFlow Object Detection API, written here from a table of their parts: every architecture of the
model zoo, and every kind of resizer, anchor, loss, optimizer, schedule and augmentation at least once."""

import itertools

HYPERPARAMS = """
  regularizer { l2_regularizer { weight: 0.0004 } }
  initializer { random_normal_initializer { stddev: 0.01 mean: 0 } }
  activation: RELU_6, batch_norm { scale: true, decay: 0.97, epsilon: 0.001, train: true }
"""
RESIZERS = (
    "fixed_shape_resizer { height: 320 width: 640 }",
    "fixed_shape_resizer { height: 300 width: 300 resize_method: AREA }",
    "keep_aspect_ratio_resizer { min_dimension: 512 max_dimension: 512 pad_to_max_dimension: true }",
    "keep_aspect_ratio_resizer { min_dimension: 600 max_dimension: 1024 }",
    "keep_aspect_ratio_resizer { min_dimension: 800 max_dimension: 1333 pad_to_max_dimension: true"
    " per_channel_pad_value: [1.5, 2, 3] }",
    "identity_resizer { }",
    "conditional_shape_resizer { condition: GREATER size_threshold: 640 convert_to_grayscale: true }",
    "pad_to_multiple_resizer { multiple: 32 convert_to_grayscale: false }",
)
SSD_ANCHORS = (
    "multiscale_anchor_generator { min_level: 3 max_level: 7 anchor_scale: 4.0 aspect_ratios: [1.0, 2.0, 0.5]"
    " scales_per_octave: 2 normalize_coordinates: true }",
    "ssd_anchor_generator { num_layers: 6 min_scale: 0.2 max_scale: 0.95 aspect_ratios: 1.0 aspect_ratios: 2.0"
    " aspect_ratios: 0.5 aspect_ratios: 3.0 aspect_ratios: 0.3333 reduce_boxes_in_lowest_layer: true }",
    "multiscale_anchor_generator { min_level: 2 max_level: 6 anchor_scale: 8 aspect_ratios: 1 scales_per_octave: 3 }",
    "flexible_grid_anchor_generator { anchor_grid { base_sizes: 16 aspect_ratios: 1 height_stride: 8 } }",
    "multiscale_anchor_generator { min_level: 3 max_level: 5 }",
    "ssd_anchor_generator { num_layers: 5 scales: [0.1, 0.2] interpolated_scale_aspect_ratio: 0 }",
)
RCNN_ANCHORS = (
    "grid_anchor_generator { scales: [0.25, 0.5, 1.0, 2.0] aspect_ratios: [0.5, 1.0, 2.0] height_stride: 16"
    " width_stride: 16 }",
    "grid_anchor_generator { height: 128 width: 128 scales: [0.25, 0.5, 1, 2, 4] aspect_ratios: 1 }",
    "multiscale_anchor_generator { min_level: 2 max_level: 6 anchor_scale: 8 aspect_ratios: [1, 2, 0.5]"
    " scales_per_octave: 1 normalize_coordinates: false }",
)
CLASS_LOSSES = (
    "weighted_sigmoid_focal { alpha: 0.75 gamma: 1.5 }",
    "weighted_sigmoid_focal { gamma: 2 }",
    "weighted_sigmoid { anchorwise_output: true }",
    "weighted_softmax { logit_scale: 1.0 }",
    "bootstrapped_sigmoid { alpha: 0.5 hard_bootstrap: true }",
    "weighted_logits_softmax { }",
)
BOX_LOSSES = (
    "weighted_smooth_l1 { delta: 1.0 }",
    "weighted_smooth_l1 { }",
    "weighted_giou { }",
    "weighted_iou { }",
    "weighted_l2 { }",
    "l1_localization_loss { }",
)
SCHEDULES = (
    "cosine_decay_learning_rate { learning_rate_base: .04 total_steps: 9000 warmup_learning_rate: .0133"
    " warmup_steps: 1000 }",
    "cosine_decay_learning_rate { learning_rate_base: 8e-2 total_steps: 300000 warmup_learning_rate: .001"
    " warmup_steps: 2500 hold_base_rate_steps: 100 }",
    "exponential_decay_learning_rate { initial_learning_rate: 0.004 decay_steps: 800720 decay_factor: 0.95 }",
    "exponential_decay_learning_rate { initial_learning_rate: 0.1 decay_steps: 500 decay_factor: 0.5 staircase: false"
    " burnin_learning_rate: 0.01 burnin_steps: 300 min_learning_rate: 1e-5 }",
    "manual_step_learning_rate { initial_learning_rate: 0.0003 schedule { step: 900000 learning_rate: .00003 }"
    " schedule { step: 1200000 learning_rate: .000003 } }",
    "manual_step_learning_rate { initial_learning_rate: 0.001 warmup: true schedule { step: 500 learning_rate: 0.02 }"
    " schedule { step: 6000 learning_rate: 0.002 } schedule { step: 8000 learning_rate: 0.0002 } }",
    "constant_learning_rate { learning_rate: 0.002 }",
    "",
)
OPTIMIZERS = (
    "momentum_optimizer: { learning_rate: { %s } momentum_optimizer_value: 0.8 } use_moving_average: false",
    "rms_prop_optimizer { learning_rate { %s } momentum_optimizer_value: 0.9 decay: 0.9 epsilon: 1.0 }",
    "adam_optimizer { learning_rate < %s > epsilon: 1e-7 } use_moving_average: true moving_average_decay: 0.999",
    "rms_prop_optimizer { learning_rate { %s } epsilon: 0.001 } use_moving_average: false moving_average_decay: 0.9",
    "adam_optimizer { learning_rate { %s } }",
)
AUGMENTATIONS = (
    "random_horizontal_flip { }",
    "random_horizontal_flip { probability: 0.3 keypoint_flip_permutation: [1, 0] }",
    "ssd_random_crop { }",
    "ssd_random_crop { operations { min_object_covered: 0.5 min_aspect_ratio: 0.5 max_aspect_ratio: 2 min_area: 0.2"
    " max_area: 1 overlap_thresh: 0.3 random_coef: 0.25 clip_boxes: true } operations { min_area: 0.4 } }",
    "random_crop_image { min_object_covered: 0 min_aspect_ratio: 0.75 max_aspect_ratio: 3 min_area: 0.75 max_area: 1"
    " overlap_thresh: 0 }",
    "random_scale_crop_and_pad_to_square { output_size: 512 scale_min: 0.1 scale_max: 2.0 }",
    "random_square_crop_by_scale { scale_min: 0.6 scale_max: 1.3 }",
    "random_crop_pad_image { min_object_covered: 0.1 random_coef: 0.5 max_padded_size_ratio: [3, 3] }",
    "random_adjust_brightness { }",
    "random_adjust_contrast { min_delta: 0.6 max_delta: 1.2 }",
    "random_adjust_saturation { }",
    "random_adjust_hue { max_delta: 0.1 }",
    "random_distort_color { color_ordering: 1 }",
    "random_pixel_value_scale { minval: 0.6 }",
    "autoaugment_image { policy_name: 'v0' }",
    "random_vertical_flip { } ",
    "random_rotation90 { }",
    "random_jpeg_quality { random_coef: 0.8 min_jpeg_quality: 60 }",
    "normalize_image { original_minval: 0 original_maxval: 255 }",
    "random_pad_image { }",
    "random_image_scale { }",
)
SSD_TYPES = (
    "ssd_mobilenet_v1", "ssd_mobilenet_v1_fpn", "ssd_mobilenet_v1_fpn_keras", "ssd_mobilenet_v1_ppn",
    "ssd_mobilenet_v2", "ssd_mobilenet_v2_keras", "ssd_mobilenet_v2_fpn_keras", "ssd_mobilenet_v2_mnasfpn",
    "ssd_mobilenet_v3_large", "ssd_mobilenet_v3_small", "ssd_mobilenet_edgetpu", "ssd_mobiledet_cpu",
    "ssd_mobiledet_gpu", "embedded_ssd_mobilenet_v1", "ssd_spaghettinet", "ssd_inception_v2", "ssd_inception_v3",
    "ssd_resnet50_v1_fpn", "ssd_resnet50_v1_fpn_keras", "ssd_resnet101_v1_fpn_keras", "ssd_resnet152_v1_fpn_keras",
    "ssd_efficientnet-b0_bifpn_keras", "ssd_efficientnet-b1_bifpn_keras", "ssd_efficientnet-b2_bifpn_keras",
    "ssd_efficientnet-b3_bifpn_keras", "ssd_efficientnet-b4_bifpn_keras", "ssd_efficientnet-b5_bifpn_keras",
    "ssd_efficientnet-b6_bifpn_keras", "ssd_efficientnet-b7_bifpn_keras", "one_of_my_own",
)  # fmt: skip
RCNN_TYPES = (
    "faster_rcnn_resnet50", "faster_rcnn_resnet50_keras", "faster_rcnn_resnet50_fpn_keras",
    "faster_rcnn_resnet101_keras", "faster_rcnn_resnet152_keras", "faster_rcnn_inception_v2",
    "faster_rcnn_inception_resnet_v2_keras", "faster_rcnn_nas", "faster_rcnn_mobilenet_v1",
)  # fmt: skip
CENTER_NET_TYPES = (
    "hourglass_104", "resnet_v1_50_fpn", "resnet_v1_101_fpn", "resnet_v2_50", "resnet_v1_18_fpn", "mobilenet_v2_fpn",
)  # fmt: skip


def _nth(choices: tuple[str, ...], k: int) -> str:
    return choices[k % len(choices)]


def ssd(kind: str, k: int) -> str:
    """The model of an SSD; k chooses among the parts."""
    return f"""model {{ ssd {{
      num_classes: 6  inplace_batchnorm_update: true  freeze_batchnorm: {"true" if k % 3 == 0 else "false"}
      box_coder {{ faster_rcnn_box_coder {{ y_scale: 10.0 x_scale: 10 height_scale: 5.0 width_scale: 5.0 }} }}
      matcher {{ argmax_matcher {{ matched_threshold: 0.6 unmatched_threshold: 0.4 ignore_thresholds: false
        negatives_lower_than_unmatched: true force_match_for_each_row: true use_matmul_gather: true }} }}
      similarity_calculator {{ iou_similarity {{ }} }}  encode_background_as_zeros: true  add_background_class: false
      anchor_generator {{ {_nth(SSD_ANCHORS, k)} }}  image_resizer {{ {_nth(RESIZERS, k)} }}
      box_predictor {{ weight_shared_convolutional_box_predictor {{ depth: 256 class_prediction_bias_init: -4.6
        conv_hyperparams {{ {HYPERPARAMS} }} num_layers_before_predictor: 4 kernel_size: 3 use_depthwise: true }} }}
      feature_extractor {{ type: '{kind}' min_depth: 16 depth_multiplier: 1.0 use_depthwise: true
        fpn {{ min_level: 3 max_level: 7 }} conv_hyperparams {{ {HYPERPARAMS} }}
        override_base_feature_extractor_hyperparams: true }}
      loss {{ classification_loss {{ {_nth(CLASS_LOSSES, k)} }} localization_loss {{ {_nth(BOX_LOSSES, k)} }}
        hard_example_miner {{ num_hard_examples: 3000 iou_threshold: 0.99 loss_type: CLASSIFICATION
          max_negatives_per_positive: 3 min_negatives_per_image: 3 }}
        classification_weight: 1.0 localization_weight: {1 + k % 2} }}
      normalize_loss_by_num_matches: true  normalize_loc_loss_by_codesize: true
      post_processing {{ batch_non_max_suppression {{ score_threshold: 1e-8 iou_threshold: 0.6
        max_detections_per_class: 100 max_total_detections: 100 use_static_shapes: false }} score_converter: SIGMOID }}
    }} }}"""


def faster_rcnn(kind: str, k: int) -> str:
    return f"""model {{ faster_rcnn {{
      num_classes: 90  number_of_stages: 2  image_resizer {{ {_nth(RESIZERS, k + 3)} }}
      feature_extractor {{ type: "{kind}" first_stage_features_stride: 16 batch_norm_trainable: true }}
      first_stage_anchor_generator {{ {_nth(RCNN_ANCHORS, k)} }}
      first_stage_box_predictor_conv_hyperparams {{ op: CONV {HYPERPARAMS} }}
      first_stage_nms_score_threshold: 0.0 first_stage_nms_iou_threshold: 0.7 first_stage_max_proposals: 300
      first_stage_localization_loss_weight: 2.0 first_stage_objectness_loss_weight: 1.0
      initial_crop_size: 14 maxpool_kernel_size: 2 maxpool_stride: 2
      second_stage_box_predictor {{ mask_rcnn_box_predictor {{ use_dropout: false dropout_keep_probability: 1.0
        fc_hyperparams {{ op: FC {HYPERPARAMS} }} share_box_across_classes: true predict_instance_masks: true }} }}
      second_stage_post_processing {{ batch_non_max_suppression {{ score_threshold: 0.0 iou_threshold: 0.6
        max_detections_per_class: 100 max_total_detections: 300 }} score_converter: SOFTMAX }}
      second_stage_localization_loss_weight: 2.0 second_stage_classification_loss_weight: 1.0
      second_stage_classification_loss {{ {_nth(CLASS_LOSSES, k + 2)} }}
      use_static_shapes: true use_matmul_crop_and_resize: true clip_anchors_to_image: true
      use_static_balanced_label_sampler: true use_matmul_gather_in_matcher: true
    }} }}"""


def center_net(kind: str, k: int) -> str:
    return f"""model {{ center_net {{
      num_classes: 90 feature_extractor {{ type: "{kind}" bgr_ordering: true channel_means: [104, 114, 120]
        channel_stds: [69, 66, 71] }}
      image_resizer {{ {_nth(RESIZERS, k + 2)} }}
      object_detection_task {{ task_loss_weight: 1.0 offset_loss_weight: 1.0 scale_loss_weight: 0.1
        localization_loss {{ l1_localization_loss {{ }} }} }}
      object_center_params {{ object_center_loss_weight: 1.0 min_box_overlap_iou: 0.7 max_box_predictions: 100
        classification_loss {{ penalty_reduced_logistic_focal_loss {{ alpha: 2.0 beta: 4.0 }} }} }}
      keypoint_label_map_path: "x.pbtxt" keypoint_estimation_task {{ task_name: "pose" }}
    }} }}"""


def training(k: int) -> str:
    """Everything but the model."""
    steps = "" if k % 7 == 6 else f"num_steps: {(9000, 25000, 2000)[k % 3]}"
    checkpoint = ('fine_tune_checkpoint: "TO_BE_CONFIGURED" fine_tune_checkpoint_type: "detection"',
                  'fine_tune_checkpoint: "gs://bucket/model.ckpt" from_detection_checkpoint: true',
                  'fine_tune_checkpoint: "x/ckpt" fine_tune_checkpoint_type: "classification"', "")[k % 4]  # fmt: skip
    options = " ".join(
        f"data_augmentation_options {{ {_nth(AUGMENTATIONS, 4 * k + j)} }}" for j in range(4 if k % 6 else 0)
    )
    optimizer = _nth(OPTIMIZERS, k) % _nth(SCHEDULES, k)
    train = ("train.record", "PATH_TO_BE_CONFIGURED/train2017-?????-of-00256.tfrecord", "gs://b/d/train.record")[k % 3]
    evaluation = ("eval.record", "PATH_TO_BE_CONFIGURED/val2017-?????-of-00032.tfrecord", "gs://b/d/test.record")[k % 3]
    return f"""
    train_config: {{ {"batch_size: 64" if k % 5 else ""} {steps} {checkpoint} sync_replicas: true
      startup_delay_steps: 0 replicas_to_aggregate: 8 {options} optimizer {{ {optimizer} }}
      max_number_of_boxes: 100 unpad_groundtruth_tensors: false use_bfloat16: {"true" if k % 2 else "false"}
      gradient_clipping_by_norm: {10 * (k % 2)} add_regularization_loss: {"false" if k % 11 == 3 else "true"} }}
    train_input_reader: {{ label_map_path: "map.pbtxt" shuffle: true num_readers: 1 queue_capacity: 500
      tf_record_input_reader {{ input_path: "{train}" }} }}
    eval_config: {{ metrics_set: "{("coco_detection_metrics", "pascal_voc_detection_metrics")[k % 2]}"
      use_moving_averages: {"true" if k % 2 else "false"} num_examples: 50 batch_size: 1; max_evals: 10 }}
    eval_input_reader: {{ label_map_path: "map.pbtxt" shuffle: false num_epochs: 1 sample_1_of_n_examples: {1 + k % 2}
      tf_record_input_reader {{ input_path: "{evaluation}" }} }}
    {"graph_rewriter { quantization { delay: 100 weight_bits: 8 activation_bits: 8 } }" if k % 5 == 0 else ""}"""


def zoo() -> dict[str, str]:
    """Name → text."""
    families = ((ssd, SSD_TYPES), (faster_rcnn, RCNN_TYPES), (center_net, CENTER_NET_TYPES))
    kinds = [(make, kind) for make, types in families for kind in types]
    return {
        f"{k:02d}-{kind}": f"# {kind}\n{make(kind, k)}\n{training(k)}\n"
        for k, (make, kind) in zip(itertools.count(), kinds, strict=False)
    }
