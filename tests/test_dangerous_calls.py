"""What runs code of others when it reads a file does not appear in stoker/, nor does a shell around a command."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "stoker"
OWN_PIPE = {"data/loading/processes.py", "data/loading/process_main.py"}
"""Messages between the loader and the processes that it starts, over a socket and memory that they inherit."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas", "pd"}
LOADS = {"load", "loads", "Unpickler", "open", "read_pickle"}
PROCESSES = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "create_subprocess_shell"}


def problems(source: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES | {"yaml"}:
            for alias in node.names:
                if alias.name in LOADS | {"unsafe_load", "full_load"}:
                    yield f"{name}:{node.lineno}: from {node.module} import {alias.name}"
        if not isinstance(node, ast.Call):
            continue
        called, _, last = (text := ast.unparse(node.func)).rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        arguments = [ast.unparse(argument) for argument in node.args]
        is_own = bool(arguments) and arguments[0].startswith(f"{called}.dumps(")  # made in the same expression
        found = (
            (called in PICKLES and last in LOADS and not is_own and name not in OWN_PIPE)
            or (text == "torch.load" and given.get("weights_only") != "True")
            or given.get("allow_pickle", "False") != "False"
            or (text in ("yaml.load", "yaml.load_all") and not any("SafeLoader" in a or "BaseLoader" in a
                                                                 for a in (*arguments[1:], *given.values())))
            or text in ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all")
            or text in ("eval", "exec", "builtins.eval", "builtins.exec")
            or (last in PROCESSES and given.get("shell", "False") != "False")
            or any(text.endswith(shell) for shell in SHELLS)
        )  # fmt: skip
        if found:
            yield f"{name}:{node.lineno}: {ast.unparse(node)[:100]}"


def test_nothing_in_stoker_runs_what_it_reads() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    found = [line for path in files for line in problems(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(data)", "pickle.Unpickler(file)", "from pickle import loads", "torch.load(path)",
     "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)", "yaml.load(text, yaml.Loader)",
     "yaml.full_load(text)", "eval(text)", "exec(text)", "subprocess.run(text, shell=True)", "os.system(text)"],
)  # fmt: skip
def test_each_is_found(source: str) -> None:
    assert list(problems(source, "x.py"))


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(pickle.dumps(error))", "torch.load(path, weights_only=True)", "yaml.load(text, yaml.BaseLoader)",
     "yaml.safe_load(text)", "model.eval()", "instruction.words(shell=True)", "subprocess.run([program])"],
)  # fmt: skip
def test_what_is_safe_is_not_found(source: str) -> None:
    assert not list(problems(source, "x.py"))
