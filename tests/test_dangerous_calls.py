"""What runs code of others when it reads a file does not appear in stoker/, nor does a shell around a command."""

import ast
from collections.abc import Iterator

import pytest

from tests import sources

OWN_PIPE = {"data/loading/processes.py", "data/loading/process_main.py"}
"""Messages between the loader and the processes that it starts, over a socket and memory that they inherit."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas", "pd"}
LOADS = {"load", "loads", "Unpickler", "open", "read_pickle"}
PROCESSES = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec"}
IMPORTS = {"import_module", "__import__", "run_path", "run_module", "spec_from_file_location", "exec_module"}
"""They run the code of a module. A name that stands in the source is no input."""
PROGRAMS = {"torch.export.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"}
EXTERNAL_DATA = {"onnx.load", "onnx.load_model", "onnx.load_external_data_for_model", "onnxruntime.InferenceSession"}
"""They read other files, which the model names, from anywhere. `onnx.load` does not if it is told so."""
FROM = {
    module: {name.rpartition(".")[2] for name in PROGRAMS | EXTERNAL_DATA | {"torch.load"} if name.startswith(module)}
    for module in ("torch", "torch.export", "torch.jit", "torch.hub", "torch.package", "onnx", "onnxruntime")
} | {"torch": {"load", "package"}, "onnx.external_data_helper": {"load_external_data_for_model"}}
"""Module → names that are not imported from it by themselves, where the rules above would not see it."""
RIGHT = {
    ("inference/runtime.py", "torch.export.load"): "a file that the user trusts, or that stoker wrote just before",
    ("inference/runtime.py", "runtime.InferenceSession"):
        "takes external data from the file's own folder only: test_a_network_does_not_read_the_files_of_others",
    ("inference/runtime.py", "importlib.import_module"): "packages of stoker's extras, named by the callers",
    ("recording/hook/stoker_hook/__init__.py", "__import__"): "modules of the hook, by its own table",
    ("launching/spec.py", "importlib.import_module"): "a module of stoker, by its table PLACES",
    ("recording/callbacks/__init__.py", "importlib.import_module"): "frameworks, named by the callers",
    ("__init__.py", "importlib.import_module"): "a module of stoker, by its table _HOME",
    ("cli/trainer.py", "importlib.import_module"): "modules of the trainer, named by the callers",
    ("cli/quick_import.py", "importlib.import_module"): "modules that the file lists",
}  # fmt: skip
"""(File, call) → why it is right there."""
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "create_subprocess_shell"}


def problems(source: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES | {"yaml"}:
            for alias in node.names:
                if alias.name in LOADS | {"unsafe_load", "full_load"}:
                    yield f"{name}:{node.lineno}: from {node.module} import {alias.name}"
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in FROM.get(node.module or "", ()):
                    yield f"{name}:{node.lineno}: from {node.module} import {alias.name}"
        if isinstance(node, ast.Import) and any(alias.name == "torch.package" for alias in node.names):
            yield f"{name}:{node.lineno}: import torch.package"
        if not isinstance(node, ast.Call):
            continue
        called, _, last = (text := ast.unparse(node.func)).rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        arguments = [ast.unparse(argument) for argument in node.args]
        is_own = bool(arguments) and arguments[0].startswith(f"{called}.dumps(")  # made in the same expression
        if (name, text) in RIGHT:
            continue
        found = (
            (called in PICKLES and last in LOADS and not is_own and name not in OWN_PIPE)
            or (text == "torch.load" and given.get("weights_only") != "True")
            or given.get("allow_pickle", "False") != "False"
            or (text in ("np.load", "numpy.load") and arguments[2:3] not in ([], ["False"]))
            or text in PROGRAMS
            or (last == "InferenceSession" and bool(called))
            or (text in EXTERNAL_DATA and given.get("load_external_data") != "False")
            or text.endswith("external_data_helper.load_external_data_for_model")
            or (last in IMPORTS and not (node.args and isinstance(node.args[0], ast.Constant)))
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
    files = list(sources.python_files())
    assert len(files) > 200
    found = [line for file, path in files for line in problems(path.read_text(), file)]
    assert not found, "\n".join(found)


def test_each_call_that_is_right_is_there() -> None:
    for file, call in RIGHT:
        trees = [ast.parse(path.read_text()) for path in sources.find(file)]
        calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert call in map(ast.unparse, [node.func for node in calls]), (file, call)


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(data)", "pickle.Unpickler(file)", "from pickle import loads", "torch.load(path)",
     "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)", "yaml.load(text, yaml.Loader)",
     "yaml.full_load(text)", "eval(text)", "exec(text)", "subprocess.run(text, shell=True)", "os.system(text)",
     "torch.export.load(path)", "torch.jit.load(path)", "torch.package.PackageImporter(path)", "torch.hub.load(a, b)",
     "from torch.export import load", "from torch.jit import load", "from torch import load",
     "from torch import package", "from torch.package import PackageImporter", "import torch.package",
     "onnx.load(path)", "onnx.load_model(path)",
     "from onnx import load", "onnx.external_data_helper.load_external_data_for_model(model, folder)",
     "from onnx.external_data_helper import load_external_data_for_model", "onnxruntime.InferenceSession(path)",
     "from onnxruntime import InferenceSession", "numpy.load(path, allow_pickle=flag)", "np.load(path, None, True)",
     "joblib.load(path)", "from joblib import load", "cloudpickle.load(file)", "cloudpickle.loads(data)",
     "importlib.import_module(name)", "importlib.import_module(f'a.{name}')", "__import__(name)",
     "runpy.run_path(path)", "importlib.util.spec_from_file_location(name, path)", "spec.loader.exec_module(module)"],
)  # fmt: skip
def test_each_is_found(source: str) -> None:
    assert list(problems(source, "x.py"))


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(pickle.dumps(error))", "torch.load(path, weights_only=True)", "yaml.load(text, yaml.BaseLoader)",
     "yaml.safe_load(text)", "model.eval()", "instruction.words(shell=True)", "subprocess.run([program])",
     "onnx.load(path, load_external_data=False)", "onnx.load_from_string(data)", "np.load(path)",
     "np.load(path, None, False)", "np.load(path, allow_pickle=False)", "torch.export.export(model, inputs)",
     "importlib.import_module('torchvision')", "importlib.util.find_spec(name)", "tracker.load(path)"],
)  # fmt: skip
def test_what_is_safe_is_not_found(source: str) -> None:
    assert not list(problems(source, "x.py"))
