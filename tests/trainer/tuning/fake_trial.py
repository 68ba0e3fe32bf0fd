"""Speaks the protocol of `stoker.training.trial` without a model: seconds follow from the settings."""

import json
import os
import sys
from pathlib import Path

settings = json.loads(sys.stdin.readline())["settings"]
fails = settings["workers"] == "auto"
if fails:
    print(json.dumps({"error": "out of memory"}), flush=True)
    sys.exit()
print(json.dumps({"workers": 1, "prefetch_depth": 2}), flush=True)
count = position = 0
for text in sys.stdin:
    request = json.loads(text)
    images, count = request["images"], count + 1
    if (marker := os.environ.get("FAIL_ONCE")) and request["do"] == "losses" and not Path(marker).exists():
        Path(marker).touch()
        print(json.dumps({"error": "the bucket did not respond", "unavailable": True}), flush=True)
        sys.exit()
    compute_s = images * 0.01 * (1 + 1 / settings["batch_size"])
    wait_s = images * 1e-5 if settings["cache"] != "none" else images * 0.05
    noise = 1 + 0.002 * (count % 3)
    seconds = {"step": compute_s, "load": wait_s, "eval": 1.0, "checkpoint": 0.01}.get(
        request["do"], compute_s + wait_s
    )
    # Of another place in the stream, the losses are others.
    starts = range(position, position + images, request["group"]) if request["do"] == "losses" else []
    losses = [1.0 + start % 97 / 97 for start in starts]
    if settings["cache"] == os.environ.get("NO_LOSSES"):
        losses = []  # none is finite
    position += images * (request["do"] in ("train", "load", "losses"))
    inputs = [2.0 if settings["cache"] == "disk" else 1.0] * 3 * len(losses)
    print(json.dumps({
        "seconds": seconds * noise, "images": images, "steps": images // settings["batch_size"],
        "phases": {"compute": compute_s, "input_wait": wait_s}, "losses": losses, "inputs": inputs,
    }), flush=True)  # fmt: skip
