"""Fails when a word of the project's former private language is in `stoker/`, `docs/`, `scripts/` or the README.

usage: python scripts/check_words.py [PATH …]     Prints file, line and word of each; exit 1 when there is any.
"""

import re
import sys
from pathlib import Path

WORDS = {
    r"pictur\w*": "image",
    r"canvas\w*": "image size, model input",
    r"crews?": "worker pool",
    r"suppression": "NMS",
    r"setbacks?": "rollback",
    r"hopeless\w*": "diverged",
    r"anew": "again, new",
    r"heeds?": "handle, check",
    r"lots|by lot": "at random",
    r"whoever|whomever": "the caller, who",
    r"nobody": "no one, nothing",
    r"witness\w*": "telemetry",
    r"rehears\w*": "dry run",
    r"processor[- ](?:time|seconds?)": "CPU time, CPU-seconds",
    r"stillness|st(?:ood|ands?) still": "idle, hang",
    r"blindness": "observability gaps",
    r"(?<!self\.)beside": "next to, besides, in the background",
    r"mend(?:s|ed|ing)?": "fix, correct",
    r"true box(?:es)?": "ground truth box",
    r"mistakes?": "error type",
    r"shares? of": "fraction of",
    r"(?:is|are) said": "say who reports it",
    r"colou?red? by lot": "random color",
    r"\w*colour\w*": "color",
    r"\w*centre[ds]?|centring": "center",
    r"gr[e]y\w*": "gray",
    r"\w*utilis\w*|\w*normalis\w*|\w*optimis\w*|\w*generalis\w*|\w*initialis\w*|\w*synchronis\w*": "American spelling",
}
OLD_NAMES = ("stoker/config/old_names.py", "stoker/knowledge/flags.toml", "scripts/check_words.py")
"""Tables of names of older versions and of other tools."""
USER_DATA = {
    "stoker/data/formats/csv.py": ("picture", "xcentre", "ycentre"),
    "stoker/data/formats/folders.py": ("pictures",),
    "stoker/knowledge/endings.toml": ("pictures", "optimiser"),
    "stoker/migration/tf_model.py": ("suppression",),
}
"""Names of columns, folders and fields in users' files, and output of users' programs, which are recognized."""
ROOT = Path(__file__).resolve().parent.parent
PATTERN = re.compile("|".join(rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])" for word in WORDS), re.IGNORECASE)
"""Also finds the words as parts of identifiers: `_` ends a word."""


def main(arguments: list[str]) -> int:
    paths = [Path(argument).resolve() for argument in arguments] or [
        ROOT / "stoker", ROOT / "docs", ROOT / "scripts", ROOT / "README.md"
    ]  # fmt: skip
    count = 0
    for path in sorted(file for top in paths for file in ([top] if top.is_file() else top.rglob("*"))):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".md", ".js", ".css", ".c", ".json", ".toml") or name in OLD_NAMES:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for match in PATTERN.finditer(line):
                if match[0] in USER_DATA.get(name, ()):
                    continue
                print(f"{name}:{number}: {match[0]}")
                count += 1
    print(f"{count} old words" if count else "no old words")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
