"""How good a model is: detections matched to ground truth (`coco`), the numbers of that (`metrics`), what went wrong
(`error_analysis`), and the file that holds it (`document`, evaluation.json). Only `evaluate` needs torch.
"""
