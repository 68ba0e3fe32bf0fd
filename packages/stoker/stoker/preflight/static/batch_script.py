"""What a Slurm batch script asks for, and how it starts what trains: facts for the rows of `job_rules.toml`. The script
is never run. What a variable or a template decides is unknown (0), and no row speaks of it."""

import difflib
import itertools
import re
from collections.abc import Iterator
from typing import Any

from stoker.preflight.catalog import JOB_FILES, judge_job
from stoker.preflight.static.image import HEREDOC, Instruction, run_commands
from stoker_watch.findings.finding import Finding

_PATTERNS = JOB_FILES["patterns"]
_NAMES = {"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "G": "gpus", "tasks-per-node": "ntasks-per-node"}


def check_batch_script(text: str, place: str, program: str) -> Iterator[Finding]:
    """All findings of a batch script. program: text of its Python script, if that is known."""
    end, begun, submits = "", False, "sbatch" in text
    code, options, lines = list[str](), dict[str, str](), dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):
        code.append("" if end or line.lstrip().startswith("#") else line)
        word = re.match(r"#([A-Za-z]{4,8})\s+-{1,2}[A-Za-z]", line)
        if word and not end and difflib.SequenceMatcher(None, word[1].upper(), "SBATCH").ratio() > 0.7:
            facts = {"misspelt": word[1] != "SBATCH", "late": begun and not submits, "text": line[:80]}
            facts["variable"] = not begun and re.search(r"\$\{?[A-Za-z_]", line)
            yield from judge_job("directive", facts, {"": number}, place)
            if word[1] == "SBATCH" and not begun:
                found = read_options(re.split(r"\s#", line[7:])[0])
                options, lines = options | found, lines | dict.fromkeys(found, number)
        elif re.match(_PATTERNS["localhost"], code[-1]) and text.count("MASTER_ADDR=") < 2:
            yield from judge_job("address", count_request(options), {"": number}, place)
        begun, heredoc = begun or bool(code[-1].strip()), HEREDOC.search(code[-1])
        end = "" if line.strip() == end else end or (heredoc[2] if heredoc else "")
    script = "\n".join(code)
    workers = max(map(_number, re.findall(_PATTERNS["workers"], script)), default=0)
    facts = dict.fromkeys(options, True) | count_request(options) | {"limit": options.get("time"), "workers": workers}
    yield from judge_job("script", facts, lines, place)
    facts = {name: re.search(_PATTERNS[name], text) for name, text in (("starter", script), ("lightning", program))}
    for number, command in _commands(script):
        yield from judge_job("command", facts | _describe_start(command, options), {"": number}, place)


def read_options(text: str) -> dict[str, str]:
    """Long names of options of sbatch and srun → values, of which the last one counts."""
    found = re.findall(r"(?<!\S)(?:--([a-z-]+)(?:=|\s+)?|-([nNcG])[=\s]*)([^\s-]\S*)?", text)
    return {_NAMES.get(long or short, long or short): value for long, short, value in found}


def count_request(options: dict[str, str]) -> dict[str, Any]:
    """How many nodes, tasks, tasks on a node and GPUs options ask for."""
    nodes, on_node = (_number(options.get(name, "1")) for name in ("nodes", "ntasks-per-node"))
    most = nodes * on_node if "nodes" in options and "ntasks-per-node" in options else 0
    tasks = _number(options["ntasks"]) if "ntasks" in options else nodes * on_node
    is_spread = "ntasks" in options and "nodes" not in options and tasks != 1  # over as many nodes as Slurm chooses
    if "ntasks" in options:
        on_node = 0 if is_spread or not nodes else -(-tasks // nodes)
    gpus = nodes * _count_gpus(options.get("gres") or "gpu:" + options.get("gpus-per-node", "$"))
    gpus = _count_gpus("gpu:" + options["gpus"]) if "gpus" in options else 0 if is_spread else gpus
    asks_gpus = any(name.startswith("gpus") or (name, value[:3]) == ("gres", "gpu") for name, value in options.items())
    counts = {"nodes": nodes, "tasks": tasks, "on_node": on_node, "most": most, "gpus": gpus, "asks_gpus": asks_gpus}
    return counts | {"cpus": _number(options.get("cpus-per-task", "1"))}


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text) else 0


def _count_gpus(text: str) -> int:
    """4 of `gpu:a100:4`, 1 of `gpu` and `gpu:a100`; 0 of what is no GPU, or not known."""
    parts = [part.partition("(")[0].split(":") for part in text.split(",") if re.match(r"(?:gres/)?gpu(?::|$)", part)]
    return 0 if re.search(r"[$@{<]|XXX", text) else sum(_number(part[-1]) or 1 for part in parts)


def _commands(script: str) -> Iterator[tuple[int, str]]:
    """(line, simple command) without what may stand before it."""
    lines = [line.removesuffix("\\") if line.endswith("\\") else f"{line}\n" for line in script.split("\n")]
    starts = tuple(itertools.accumulate(map(len, lines[:-1]), initial=0))
    for words in run_commands(Instruction("SHELL", "".join(lines), starts, tuple(range(1, len(lines) + 1))), {}):
        yield words[0].line, re.sub(_PATTERNS["before_command"], "", " ".join(word.text for word in words), count=1)


def _describe_start(command: str, options: dict[str, str]) -> dict[str, Any]:
    """Who starts a command, in how many tasks, and what it starts itself."""
    launcher = re.search(_PATTERNS["launcher"], command)
    python, is_step = _PATTERNS["python"], re.match(r"(?:\S*/)?srun\s", command)
    own = read_options(re.split(_PATTERNS["program"], command, maxsplit=1)[0]) if is_step else {}
    counts = re.findall(_PATTERNS["processes"], command) or ["" if launcher and "accel" in launcher[0] else "1"]
    return count_request(options | own) | {
        "step": is_step and (launcher or re.search(python, command)),
        "in_shell": not is_step and re.match(f"{python}|{_PATTERNS['launcher']}", command),
        "launcher": launcher, "name": launcher[1] if launcher else "", "several": counts[-1] != "1",
        "rank": "".join(re.findall(_PATTERNS["rank"], command)[-1:]), "rdzv": "rdzv" in command, "text": command[:60],
    }  # fmt: skip
