"""Parts that several detectors share: boxes and anchors, matching, losses, norms, NMS, RoIAlign."""
