"""How good a model is: detections matched to ground truth (`coco`), the numbers of that (`metrics`, also the content of
evaluation.json), what went wrong (`error_analysis`), images with its boxes (`draw`). Only `evaluate` needs torch.
"""
