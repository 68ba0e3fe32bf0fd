"""Speaks the protocol of `stoker.training.trial` for a range test: the loss falls up to 0.1, then it is not finite."""

import json
import sys

json.loads(sys.stdin.readline())
print(json.dumps({"workers": 1, "prefetch_depth": 2}), flush=True)
for text in sys.stdin:
    lr = json.loads(text)["lr"]
    losses = [1 / (1 + lr)] if lr < 0.1 else []
    print(json.dumps({"seconds": 0.001, "images": 1, "steps": 1, "losses": losses}), flush=True)
