"""RetinaNet and its lite variant."""
