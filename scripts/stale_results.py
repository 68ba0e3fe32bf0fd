"""Lists results of benchmarks that are older than the code they measure: `make check` shows them, and fails for none.

A result names the commit it was measured at; where an older one names none, the commit of its file counts. MEASURES
says which code a benchmark measures; `git log COMMIT.. -- PATHS` then tells whether it changed since.
"""

import glob
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOADING = ("stoker/data/loading", "stoker/data/images", "stoker/data/augment.py", "stoker/data/geometry.py")
MODELS = (
    "stoker/models",
    *(f"stoker/training/{name}.py" for name in ("step", "optim", "make_optimizer", "norm_stats", "loss_sums", "muon")),
)
TRAINING = (*MODELS, "stoker/training/loop.py", "stoker/training/defaults", "stoker/knowledge/recipes.toml")
MEASURES: dict[str, tuple[str, ...]] = {
    "cache": ("stoker/data/images/pixel_cache.py", *LOADING),
    "diagnose": ("stoker_watch/diagnosis", "stoker_watch/recording", "stoker_watch/knowledge/causes.toml"),
    "diagnose_logs": (
        "stoker_watch/diagnosis", "stoker_watch/knowledge/endings.toml", "stoker_watch/knowledge/output_lines.toml",
    ),
    "diagnose_programs": ("stoker_watch/diagnosis", "stoker_watch/watch", "stoker_watch/knowledge/causes.toml"),
    "diagnose_wild": (
        "stoker_watch/diagnosis", "stoker_watch/watch", "stoker_watch/recording", "stoker_watch/knowledge/endings.toml",
    ),
    "ember": TRAINING,
    "end_to_end": (*LOADING, *TRAINING),
    "evaluate": ("stoker/evaluation",),
    "fine_tuning": TRAINING,
    "gil": LOADING,
    "index": (
        "stoker/data/index.py", "stoker/data/index_cache.py", "stoker/data/formats/coco.py",
        "stoker/data/formats/finder.py", "stoker/data/formats/images.py", "stoker/data/validation/clean.py",
    ),
    "latency": (*MODELS, "stoker/inference"),
    "ledger": ("stoker_watch/recording/ledger.py",),
    "loader": LOADING,
    "plan": ("stoker/planning",),
    "pretraining": TRAINING,
    "quality": TRAINING,
    "roofline": (*MODELS, "stoker/data/augment.py"),
    "ranks": ("stoker/training/ranks.py", "stoker/training/several.py", *MODELS),
    "scaling": ("stoker/training/ranks.py", "stoker/training/several.py", *MODELS),
    "shard_loading": ("stoker/data/formats/webdataset.py", "stoker/data/packing.py", *LOADING),
    "scale": TRAINING,
    "search": ("stoker/search",),
    "startup": ("stoker/cli", "stoker/training/start.py", "stoker/training/run.py"),
    "step": MODELS,
    "storage": ("stoker_watch/storage",),
    "lr": ("stoker/tuning/learning_rate.py", "stoker/training/lr_policy.py", *MODELS),
    "watch_overhead": ("stoker_watch/watch", "stoker_watch/recording"),
    "tune": ("stoker/tuning", "stoker/training/trial.py", *LOADING),
}  # fmt: skip
"""Benchmark → the code it measures."""


def git(*arguments: str) -> str:
    """The output of a git command; empty if it fails, as for a commit that is not in this clone."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def stale_results(folder: Path) -> list[str]:
    """A line for each result of which the benchmark is not in MEASURES, or whose code changed since."""
    lines = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        name = re.sub(r".*[ /](\w+?)(\.py)?$", r"\1", content["command"].split(" --")[0])
        if name not in MEASURES:
            lines.append(f"{file.name}: scripts/stale_results.py does not say what {name!r} measures")
            continue
        commit = content.get("commit") or git("log", "-1", "--format=%h", "--", str(file))
        paths = [path for measured in MEASURES[name] for path in glob.glob(f"packages/*/{measured}", root_dir=ROOT)]
        changes = git("log", "--format=%h", f"{commit.removesuffix('-dirty')}..", "--", *paths).splitlines()
        if changes:
            lines.append(f"{file.name}: measured at {commit}, {len(changes)} later commits change what it measures")
    return lines


if __name__ == "__main__":
    found = stale_results(ROOT / "benchmarks" / "results")
    print(f"{len(found)} results of benchmarks are older than the code they measure" + ":" * bool(found))
    for line in found:
        print(f"  {line}")
