"""What the quoted lines of an ending say beyond its row in `endings.toml`: the missing package, the processes that hold
the GPU's memory, the job's own lines in which the exception was raised. A finding in, the more exact one out."""

import re

import msgspec

from stoker_watch.diagnosis.causes.shared import make_evidence
from stoker_watch.diagnosis.endings import find_raising_lines, find_tracebacks
from stoker_watch.diagnosis.run_data import LogLine
from stoker_watch.findings.finding import Finding
from stoker_watch.knowledge import read_toml

MAX_GRAPH_LINES = 400
"""Lines of a traceback of TensorFlow below its exception, at most (heuristic)."""
_MISSING_MODULE = re.compile(r"No module named ['\"]?(\w{1,100}(?:\.\w{1,100}){0,9})")


def name_package(finding: Finding) -> Finding:
    """The finding of a missing package with its name in the fix."""
    found = (_MISSING_MODULE.search(item.text) for item in finding.evidence)
    module = next((match[1] for match in found if match is not None), None)
    if finding.id != "package_missing" or module is None:
        return finding
    names, top = read_toml("package_names.toml"), module.partition(".")[0]
    fix = finding.fix.replace("NAME", str(names.get(module, module)))
    if not names.get(module, names.get(top, top)):
        fix = (
            f"{top} is a folder of the program's repository: start the job in the folder that has it, add that to "
            "PYTHONPATH, or install the repository (`pip install -e .`, and what its README builds)"
        )
    elif module != top and module not in names:
        fix = (
            f"{top} is there, {module} is not in it: install another version of it, or rename a file or folder of "
            f'yours that hides it (`python -c "import {top}; print({top}.__file__)"`)'
        )
    return msgspec.structs.replace(finding, fix=fix)


_BYTES = r"\d{1,6}(?:\.\d{1,4})? (?:[KMGT]iB|bytes)"
_GPU_MEMORY = (
    re.compile(
        rf"total capac\w{{2,4}} of (?P<total>{_BYTES}) of which (?P<free>{_BYTES}) is free"
        rf".{{0,450}}this process has (?P<own>{_BYTES})"
    ),
    re.compile(
        rf"(?P<total>{_BYTES}) total capacity; {_BYTES} already allocated; (?P<free>{_BYTES}) free; "
        rf"(?P<own>{_BYTES}) reserved"
    ),
)
"""What torch prints of a GPU's memory, since 2.1 and before."""
_IN_GIB = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}


def name_memory_holders(finding: Finding) -> Finding:
    """The finding of a full GPU with the fix for one that other processes hold, if they hold most of its memory."""
    found = (pattern.search(item.text) for item in finding.evidence for pattern in _GPU_MEMORY)
    memory = next((match for match in found if match is not None), None)
    if finding.id != "gpu_out_of_memory" or memory is None:
        return finding
    values = (memory[name].split(" ") for name in ("total", "free", "own"))
    total, free, own = (float(number) * _IN_GIB[unit] for number, unit in values)
    others = total - free - own
    if others < total / 2:
        return finding
    held = make_evidence(f"of its {total:,.1f} GiB this process had {own:,.1f}, others had {others:,.1f}", others)
    return msgspec.structs.replace(
        finding,
        title="The GPU ran out of memory, most of which other processes hold",
        evidence=[*finding.evidence, held],
        fix="End the other processes (`nvidia-smi` lists them) or choose another GPU (CUDA_VISIBLE_DEVICES); a smaller "
        "batch helps little",
    )


MAX_EXCEPTION_CHARS = 300


def name_place(lines: tuple[LogLine, ...], finding: Finding) -> Finding:
    """The finding with the job's own lines in which the exception was raised that it quotes."""
    quoted = {evidence.source for evidence in finding.evidence}
    for traceback in reversed(find_tracebacks(lines)):
        span = _with_graph_error(lines, traceback)
        if quoted.isdisjoint(line.source for line in lines[span[0] : span[1] + 1]):
            continue
        if frames := find_raising_lines(lines, span):
            raised = make_evidence(f"raised at {frames[0]}" + "".join(f", called at {at}" for at in frames[1:]))
            place, last = frames[0].partition(" ")[0], lines[span[1]]
            evidence = [*finding.evidence, raised]
            if finding.id == "data_function_failed" and last.source not in quoted:  # the worker's own exception
                evidence.insert(1, make_evidence(last.text.strip()[:MAX_EXCEPTION_CHARS], source=last.source))
            return msgspec.structs.replace(finding, evidence=evidence, place=place)
    return finding


def name_graph_error(lines: tuple[LogLine, ...], finding: Finding) -> Finding:
    """The finding of an error inside of a graph of TensorFlow with what is wrong, and in which operation: these are
    the last lines of a message that goes on below the exception."""
    quoted = {evidence.source for evidence in finding.evidence}
    for traceback in reversed(find_tracebacks(lines)):
        _, last = _with_graph_error(lines, traceback)
        if last == traceback[1] or lines[traceback[1]].source not in quoted:
            continue
        texts = [line for line in lines[traceback[1] + 1 : last + 1] if line.text.strip()][-2:]
        told = [make_evidence(line.text.strip()[:MAX_EXCEPTION_CHARS], source=line.source) for line in texts]
        return msgspec.structs.replace(finding, evidence=[*told, *finding.evidence])
    return finding


def _with_graph_error(lines: tuple[LogLine, ...], span: tuple[int, int]) -> tuple[int, int]:
    """The span of a traceback, with what TensorFlow prints below it of an error inside of a graph: the lines that built
    the operation, and what is wrong."""
    if not lines[span[1]].text.endswith("Graph execution error:"):
        return span
    later = range(span[1] + 1, min(len(lines), span[1] + MAX_GRAPH_LINES))
    return span[0], next((index for index in later if "[[{{node" in lines[index].text), span[1])
