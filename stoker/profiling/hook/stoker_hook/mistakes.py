"""What no clock shows of a training loop: a debugging aid that stays on, and mistakes that frameworks do not report,
such as gradients that are never cleared. They are found by a few looks at the loss, the gradients and the interpreter.

A kind of mistake is a name here and a row of `stoker/knowledge/mistakes.toml`, which says what it is and how it is
mended. In the training thread; nothing of the job is changed.
"""

import json
import os
import sys
from collections import deque
from weakref import ref

from .failures import report_failure
from .growth import NOT_OWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LOOK_STEPS, GRADIENT_STEPS = 16, (16, 32, 48)
"""Steps from one look at the interpreter to the next. Steps in which gradients are looked at, which waits for a device;
after the last of them, each multiple of it."""
MIN_LOOKS, MIN_ON = 3, 0.9
"""Looks, and the fraction of them, that must have seen the same."""
WATCHED_STEPS, MIN_OLD = 40, 0.9
"""Steps of an optimizer in which its gradients are followed, and the fraction of them that began with old ones."""
MIN_REPLACED = 4
"""Optimizers that took the place of others, from which the loop makes them again and again: one that freezes a part of
the model first has two."""
PLACE_ATTR = "_stoker_place"
"""Attribute of an optimizer: the line that made it."""
LOSS_BACKWARDS, MAX_LOSS_NODES = (1, 2, 5, 20), 300
"""Backward passes in which the operations next to the loss are looked at, and how many of them."""
SIZED_BACKWARDS, MAX_NODES, MIN_GROWTH = (4, 8, 16, 32, 64), 20_000, 1.7
"""Backward passes of which the graph is counted, up to so many nodes, and a graph that grows by this factor from each
to the next: one that contains the steps before doubles, and sequences of any length do not."""
_RESHAPES = ("View", "Reshape", "UnsafeView", "Permute", "Transpose", "Squeeze", "Unsqueeze", "T", "Alias", "Clone",
             "Slice", "Select", "ToCopy", "Expand")  # fmt: skip
_RAW = ("Addmm", "Mm", "Convolution", "MkldnnConvolution", "Softmax", "Sigmoid")
"""Operations of which no result is a logarithm of probabilities."""
_TRAINS_ONLY = ("Dropout", "BatchNorm", "DropPath", "StochasticDepth", "InstanceNorm")
"""In the names of classes of modules that work differently while a model is trained."""


class _Watched:
    """An optimizer. parameter: one that has a gradient."""

    __slots__ = ("is_cleared", "old", "optimizer", "parameter", "saw_backward", "steps")

    def __init__(self, optimizer: "Any", parameter: "Any") -> None:
        self.optimizer, self.parameter = ref(optimizer), ref(parameter)
        self.is_cleared = self.saw_backward = False
        self.steps = self.old = 0

    def look(self) -> None:
        """A backward pass begins: whether it adds to a gradient of an earlier step."""
        parameter = self.parameter()
        grad = None if parameter is None else parameter.grad
        self.saw_backward = True
        self.is_cleared = self.is_cleared or grad is None or not _is_readable(grad) or not bool(grad.any())

    def step(self) -> bool:
        """The optimizer has stepped. Whether its gradients are known to be old ones now."""
        self.steps += 1
        self.old += self.saw_backward and not self.is_cleared
        self.is_cleared = self.saw_backward = False
        return self.steps == WATCHED_STEPS and self.old >= MIN_OLD * WATCHED_STEPS


class MistakeFinder:
    """directory: of the state files."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "%d.mistakes" % os.getpid())  # noqa: UP031
        self._found: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}
        """Kind → the line that the framework's own function was called from."""
        self._looks: dict[str, int] = {}
        self._steps = self._backwards = self._replaced = 0
        self._num_looks = 0
        self._watched: dict[int, _Watched] = {}
        self._stepped_parameters: dict[int, tuple[Any, Any]] = {}
        """ID of a parameter → it, and the newest optimizer that changed it."""
        self._sizes: list[int] = []
        self._evaluated: deque[Any] = deque(maxlen=8)
        self._eval_steps = 0
        self._is_on = True

    def report(self, kind: str, place: str = "", **values: "Any") -> None:
        """Writes it into a file for the watcher, unless it is there."""
        if kind in self._found:
            return
        self._found[kind] = dict(values, kind=kind, place=place or self._places.get(kind, ""))
        with open(self._path + ".new", "w") as file:
            json.dump(list(self._found.values()), file)
        os.replace(self._path + ".new", self._path)

    def note_place(self, kind: str) -> None:
        """Something was turned on that is a mistake only if it stays."""
        self._places[kind] = own_line()

    def note_evaluated(self, module: "Any") -> None:
        """The module was put into its mode for evaluation."""
        if self._is_on:
            self._evaluated.append((ref(module), own_line()))

    def before_backward(self, tensors: "Any", create_graph: "Any") -> None:
        """An outermost backward pass of the training thread begins, from the loss or several tensors. create_graph: as
        of torch.autograd.backward."""
        if not self._is_on:
            return
        try:
            self._backwards += 1
            if create_graph and self._count("create_graph") == LOOK_STEPS:
                self.report("create_graph", own_line())
            for watched in self._watched.values():
                if watched.steps < WATCHED_STEPS and not watched.is_cleared:
                    watched.look()
            if self._backwards in LOSS_BACKWARDS:
                for kind in _loss_mistakes(tensors):
                    self.report(kind, own_line())
            if self._backwards in SIZED_BACKWARDS:
                self._sizes.append(sum(1 for _ in _nodes(tensors, MAX_NODES)))
                sizes = self._sizes
                pairs = list(zip(sizes, sizes[1:]))  # noqa: B905, RUF007 (Python 3.8)
                if len(sizes) == len(SIZED_BACKWARDS) and all(b >= min(MIN_GROWTH * a, MAX_NODES) for a, b in pairs):
                    self.report("growing_graph", own_line(), first=sizes[0], last=sizes[-1])
        except Exception as error:  # noqa: BLE001 (a tensor of a kind that is not known)
            self._stop(error)

    def after_step(self, optimizer: "Any", groups: "Any", is_trained: "Callable[[Any], bool]") -> None:
        """An optimizer of torch has stepped. is_trained: whether a module has the parameters that are trained."""
        if not self._is_on:
            return
        try:
            watched = self._watched.get(id(optimizer))
            if watched is None or watched.optimizer() is not optimizer:
                self._add(optimizer, groups)
            elif watched.steps < WATCHED_STEPS and watched.step():
                self.report("old_gradients", own_line())
            self._steps += 1
            if self._evaluated:
                self._look_at_mode(is_trained)
            if self._steps in GRADIENT_STEPS or self._steps % GRADIENT_STEPS[-1] == 0:
                self._look_at_gradients(groups)
            if self._steps % LOOK_STEPS == 0:
                self.look(_torch_aids())
        except Exception as error:  # noqa: BLE001 (an optimizer with other groups than torch's)
            self._stop(error)

    def look(self, aids: "dict[str, bool]") -> None:
        """aids: kind → whether it is on; those of Python are added. One that is on in nearly all looks is reported."""
        self._num_looks += 1
        for kind, is_on in {**_python_aids(), **aids}.items():
            self._looks[kind] = self._looks.get(kind, 0) + is_on
            if self._looks[kind] >= max(MIN_LOOKS, MIN_ON * self._num_looks):
                self.report(kind)

    def _count(self, kind: str) -> int:
        self._looks[kind] = self._looks.get(kind, 0) + 1
        return self._looks[kind]

    def _add(self, optimizer: "Any", groups: "Any") -> None:
        """An optimizer steps for the first time."""
        parameters = (parameter for group in groups for parameter in group["params"])
        parameter = next((one for one in parameters if one.grad is not None and _is_readable(one.grad)), None)
        if parameter is None:
            return
        before, older = self._stepped_parameters.get(id(parameter), (lambda: None, lambda: None))
        if before() is parameter and older() is None and optimizer.state:  # what the older one knew is lost
            self._replaced += 1
            if self._replaced >= MIN_REPLACED:
                place = optimizer.__dict__.get(PLACE_ATTR, "")
                self.report("optimizer_again", place, steps=self._steps, optimizers=self._replaced)
        self._stepped_parameters[id(parameter)] = ref(parameter), ref(optimizer)
        if len(self._watched) > 64:
            self._watched.clear()
        self._watched[id(optimizer)] = _Watched(optimizer, parameter)

    def _look_at_mode(self, is_trained: "Callable[[Any], bool]") -> None:
        alive = [(module(), place) for module, place in self._evaluated]
        evaluated = [(module, place) for module, place in alive if module is not None and not module.training]
        wrong, place = next((entry for entry in evaluated if is_trained(entry[0])), (None, ""))
        if wrong is None:
            self._evaluated.clear()  # trained again, or it is another model
            self._eval_steps = 0
            return
        self._eval_steps += 1
        if self._eval_steps < LOOK_STEPS:
            return
        names = {type(module).__name__ for module in wrong.modules()}
        affected = sorted(name for name in names if any(part in name for part in _TRAINS_ONLY))
        self._evaluated.clear()
        if affected:
            self.report("eval_mode", place, step=self._steps, layers=", ".join(affected[:3]))

    def _look_at_gradients(self, groups: "Any") -> None:
        gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
        gradients = [grad for grad in gradients if _is_readable(grad)]
        if not gradients:
            return
        total = float(gradients[-1].float().abs().sum())  # a sum of many in half precision overflows
        is_finite = total - total == 0.0
        is_zero = total == 0.0 and not any(bool(grad.any()) for grad in gradients)
        is_double = str(gradients[-1].dtype) == "torch.float64"
        for kind, is_so in (("non_finite_gradients", not is_finite), ("zero_gradients", is_zero),
                            ("double_precision", is_double)):  # fmt: skip
            self._looks[kind] = self._looks.get(kind, 0) + 1 if is_so else 0
            if self._looks[kind] >= MIN_LOOKS:
                self.report(kind, step=self._steps)

    def _stop(self, error: BaseException) -> None:
        self._is_on = False
        report_failure("mistakes", error)


def _python_aids() -> "dict[str, bool]":
    """Whether each function, line or allocation of Python is recorded."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = {monitoring.get_tool(number) for number in range(6)} if monitoring is not None else set()
    tracemalloc = sys.modules.get("tracemalloc")
    return {
        "line_tracing": sys.gettrace() is not None or any(tool and "coverage" in str(tool).lower() for tool in tools),
        "python_profiler": sys.getprofile() is not None or "cProfile" in tools,
        "tracemalloc": tracemalloc is not None and tracemalloc.is_tracing(),
    }


def _torch_aids() -> "dict[str, bool]":
    torch = sys.modules["torch"]
    profiles = getattr(torch.autograd, "_profiler_enabled", bool)
    return {"anomaly": bool(getattr(torch, "is_anomaly_enabled", bool)()), "autograd_profiler": bool(profiles())}


def _is_readable(grad: "Any") -> bool:
    """Whether its values can be read without an effect on the job: a part of a tensor on several devices would need all
    of them, a lazy one is computed for it, and nothing may be read while a CUDA graph is captured."""
    if type(grad).__name__ != "Tensor" or grad.is_sparse:
        return False
    return grad.device.type == "cpu" or (
        grad.device.type == "cuda" and not sys.modules["torch"].cuda.is_current_stream_capturing()
    )


def _nodes(tensors: "Any", limit: int) -> "Iterator[Any]":
    """The operations that a backward pass goes through, those next to the loss first."""
    roots = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
    waiting = deque(tensor.grad_fn for tensor in roots if getattr(tensor, "grad_fn", None) is not None)
    seen = set(waiting)
    for _ in range(limit):
        if not waiting:
            return
        node = waiting.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _operation(node: "Any") -> str:
    return str(node.name()).partition("Backward")[0].rpartition("::")[2]


def _before(node: "Any") -> "Any":
    """The operation whose result a node was given, behind those that only change its shape."""
    for _ in range(8):
        node = node.next_functions[0][0] if node.next_functions else None
        if node is None or _operation(node) not in _RESHAPES:
            return node
    return None


def _loss_mistakes(tensors: "Any") -> "set[str]":
    """Kinds of mistakes in how a loss of torch is given its input."""
    found = set()
    for node in _nodes(tensors, MAX_LOSS_NODES):
        name = _operation(node)
        if name not in ("NllLoss", "NllLoss2D", "NllLossNd", "BinaryCrossEntropyWithLogits"):
            continue
        given = _before(node)
        before = "" if given is None else _operation(given)
        if name == "BinaryCrossEntropyWithLogits":
            if before in ("Sigmoid", "Softmax"):
                found.add("sigmoid_twice")
        elif before in _RAW:
            found.add("raw_nll")
        elif given is not None and before == "LogSoftmax":
            first = _before(given)
            if first is not None and _operation(first) in ("Softmax", "Sigmoid"):
                found.add("softmax_twice")
            probabilities = getattr(given, "_saved_result", None)
            if probabilities is not None and probabilities.shape[_dimension(given, probabilities)] == 1:
                found.add("one_class")
    return found


def _dimension(node: "Any", result: "Any") -> int:
    """Torch keeps a negative one as an unsigned number."""
    dimension = int(getattr(node, "_saved_dim", -1))
    return dimension if dimension < result.dim() else dimension - (1 << 64)


def own_line() -> str:
    """FILE:LINE of the innermost frame that is not of a library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not NOT_OWN.search(name):
            return "%s:%d" % (name, frame.f_lineno)  # noqa: UP031
        frame = frame.f_back
    return ""
