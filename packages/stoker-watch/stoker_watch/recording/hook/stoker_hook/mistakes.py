"""What no clock shows of a training loop: a debugging aid that stays on, and mistakes that frameworks do not report,
such as gradients that are never cleared. They are found by a few looks at the loss, the gradients and the interpreter.

A kind of mistake is a name here and a row of `stoker_watch/knowledge/mistakes.toml`, which says what it is and how to
fix it. In the training thread; nothing of the job is changed.
"""

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import ref

from .batches import BatchFinder
from .failures import report_failure
from .growth import NOT_OWN

LOOK_STEPS, FREQUENT_STEPS = 16, 48
"""Steps from one look at the interpreter, or at an optimizer's gradients, to the next. Reading gradients waits for a
device, so after so many steps of the optimizer it is done at twice as many steps each time."""
MIN_LOOKS, MIN_ON = 3, 0.9
"""Looks, and the fraction of them, that must have seen the same."""
WATCHED_STEPS, MIN_OLD = 40, 0.9
"""Steps of an optimizer in which its gradients are followed, and the fraction of them that began with old ones."""
MIN_REPLACED, MAX_REPLACED_STEPS = 4, 200
"""Optimizers that took the place of others of so few steps, from which the loop makes them again and again."""
MAX_READ = 4096
"""Values of a gradient, or of a weight, that are read."""
WEIGHTS, GROWTH_STEPS, MIN_WEIGHT_GROWTH = 3, (16, 400), 5.0
"""Matrices of an optimizer whose size before its first step is known, the steps from and up to which they are looked at
again, and the growth from which these are far too large."""
USED_STEPS, MIN_UNUSED = (17, 34, 51), 0.55
"""Steps of an optimizer, odd and even, at which parameters without a gradient are looked for; fraction of values."""
NO_GRADIENT_STEPS = 32
"""Steps of optimizers without any gradient, from which one is reported."""
PLACE_ATTR = "_stoker_place"
"""Attribute of an optimizer: the line that made it."""
LOSS_BACKWARDS, MAX_LOSS_NODES = (1, 2, 5, 20), 300
"""Backward passes in which the operations next to the loss are looked at, and how many of them."""
SIZED_BACKWARDS, MAX_NODES, MIN_GROWTH = (4, 8, 16, 32, 64), 20_000, 1.7
"""Backward passes of which the graph is counted, up to so many nodes, and a graph that grows by this factor from each
to the next: one that contains the steps before doubles, and sequences of any length do not."""
_RESHAPES = ("View", "Reshape", "UnsafeView", "Permute", "Transpose", "Squeeze", "Unsqueeze", "T", "Alias", "Clone",
             "Slice", "Select", "ToCopy", "Expand")  # fmt: skip
_COMPARISONS = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
"""Losses of torch that compare values one by one, after they were made of one size."""
_SIGMOID_LOSS = "BinaryCrossEntropyWithLogits"
_LAYERS, _PROBABILITIES = ("Addmm", "Mm", "Convolution", "MkldnnConvolution"), ("Softmax", "Sigmoid")
"""Operations whose results are any numbers, or probabilities, and no logarithms of these."""
_TRAINS_ONLY = ("Dropout", "BatchNorm", "DropPath", "StochasticDepth", "InstanceNorm")
"""In the names of classes of modules that work differently while a model is trained."""


class _Watched:
    """An optimizer. position: (group, index) of a parameter that has a gradient; torch.utils.swap_tensors refuses
    parameters to which something refers, also weakly."""

    def __init__(self, optimizer: "Any", position: "tuple[int, int]") -> None:
        self.optimizer, self.position = ref(optimizer), position
        self.sizes: dict[tuple[int, int], float] = {}
        """Position of a matrix → its mean size before the first step."""
        self.unused: set[tuple[int, int]] | None = None
        self.is_cleared = self.saw_backward = False
        self.before: tuple[int, int] | None = None
        self.steps, self.old, self.look_at = 1, 0, LOOK_STEPS

    def _grad(self) -> "Any":
        optimizer = self.optimizer()
        if optimizer is None:
            return None
        grad = optimizer.param_groups[self.position[0]]["params"][self.position[1]].grad
        return grad if grad is not None and _is_readable(grad) else None

    def begin_backward(self) -> None:
        """A backward pass begins: whether there is a gradient of an earlier step."""
        if self.steps >= WATCHED_STEPS or self.is_cleared:
            return
        grad = self._grad()
        self.saw_backward = True
        self.is_cleared = grad is None or not bool(grad.any())
        self.before = None if self.is_cleared else (id(grad), grad._version)

    def end_backward(self) -> None:
        """Whether the pass has added to it; else it is of another model, or is assigned by the loop."""
        if self.before is not None:
            grad, (number, version) = self._grad(), self.before
            self.is_cleared = grad is None or id(grad) != number or grad._version == version
            self.before = None

    def step(self) -> bool:
        """The optimizer has stepped. Whether its gradients are known to be old ones now."""
        self.steps += 1
        if self.steps > WATCHED_STEPS:
            return False
        self.old += self.saw_backward and not self.is_cleared
        self.is_cleared = self.saw_backward = False
        return self.steps == WATCHED_STEPS and self.old >= MIN_OLD * (WATCHED_STEPS - 1)


class MistakeFinder:
    """Looks at a training loop, and writes what it finds into `directory`, that of the state files."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, f"{os.getpid()}.mistakes")
        self._found: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}
        """Kind → the line that the framework's own function was called from."""
        self._looks: dict[str, int] = {}
        self._steps = self._backwards = self._replaced = 0
        self._num_looks = 0
        self._watched: dict[int, _Watched] = {}
        self._owners: dict[tuple[Any, ...], _Watched] = {}
        """ID and shape of a parameter → the newest optimizer that changed it."""
        self._first_sizes: dict[int, dict[tuple[int, int], float]] = {}
        """ID of an optimizer that steps for the first time → the sizes of its first matrices."""
        self._sizes: list[int] = []
        self._evaluated: deque[Any] = deque(maxlen=8)
        self._eval_steps = 0
        self.batches = BatchFinder(self.report, self.withdraw, own_line)
        self._retains = False
        """Whether the newest backward pass keeps its graph."""
        self._cores: float | None = None
        self.is_on = True

    def report(self, kind: str, place: str = "", **values: "Any") -> None:
        """Writes it into a file for the watcher, unless it is there. Never raises."""
        if kind not in self._found:
            self._found[kind] = dict(values, kind=kind, place=place or self._places.get(kind, ""))
            self._write()

    def withdraw(self, kind: str) -> None:
        if self._found.pop(kind, None) is not None:
            self._write()

    def _write(self) -> None:
        try:
            with open(self._path + ".new", "w") as file:
                json.dump(list(self._found.values()), file)
            os.replace(self._path + ".new", self._path)
        except Exception as error:  # noqa: BLE001 (no space, or the watcher is gone)
            self.stop(error)

    def note_place(self, kind: str) -> None:
        """Something was turned on that is a mistake only if it stays."""
        self._places[kind] = own_line()

    def note_evaluated(self, module: "Any") -> None:
        self._evaluated.append((ref(module), own_line()))

    def before_backward(self, tensors: "Any", create_graph: "Any", retain_graph: "Any") -> None:
        """An outermost backward pass begins, with these arguments of torch.autograd.backward."""
        if _is_compiling():
            return
        self._backwards += 1
        self._retains = bool(retain_graph) and not create_graph
        if self._retains and "retained_graph" not in self._places:
            self.note_place("retained_graph")
        if create_graph and self.count("create_graph") == LOOK_STEPS:
            self.report("create_graph", own_line())
        for watched in self._watched.values():
            watched.begin_backward()
        if self._backwards in LOSS_BACKWARDS:
            self._look_at_loss(tensors)
        if self._backwards in SIZED_BACKWARDS:
            self._sizes.append(sum(1 for _ in _nodes(tensors, MAX_NODES)))
            sizes = self._sizes
            pairs = list(zip(sizes, sizes[1:]))  # noqa: B905, RUF007 (Python 3.8)
            grows = all(b >= min(MIN_GROWTH * a, MAX_NODES) for a, b in pairs)
            if len(sizes) == len(SIZED_BACKWARDS) and grows and sizes[1] < MAX_NODES:
                self.report("growing_graph", own_line(), first=sizes[0], last=sizes[-1])

    def _look_at_loss(self, tensors: "Any") -> None:
        self.note_place("zero_gradients")
        for kind in _loss_mistakes(tensors):
            if self.count(kind) == 2:  # one may be a batch of a single sample
                self.report(kind, own_line())
        classes = _num_classes(tensors)
        if classes > 1 and self.count(f"class_loss of {classes}") == 2:
            self.report("class_loss", own_line(), classes=classes)

    def after_backward(self) -> None:
        for watched in self._watched.values():
            watched.end_backward()

    def before_step(self, optimizer: "Any") -> None:
        key = id(optimizer)
        if key in self._watched or key in self._first_sizes or _is_compiling():
            return
        if len(self._first_sizes) > 64:
            self._first_sizes.clear()
        self._first_sizes[key] = {where: size for where, size in _sizes(optimizer.param_groups) if size > 0}

    def after_step(self, optimizer: "Any", groups: "Any", is_trained: "Callable[[Any], bool]") -> None:
        """An optimizer of torch has stepped. is_trained: whether a module has the parameters that are trained."""
        if _is_compiling():
            return
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            self._add(optimizer, groups)
        elif watched.step():
            self.report("old_gradients", own_line())
        self._steps += 1
        if self._retains and self.count("retained_graph") >= max(LOOK_STEPS, MIN_ON * self._steps):
            self.report("retained_graph")
        self._retains = False
        self.batches.after_step()
        if self._evaluated:
            self._look_at_mode(is_trained)
        if watched is not None and watched.steps in USED_STEPS:
            self._look_at_used(watched, groups)
        if watched is not None and watched.steps == watched.look_at:
            at = watched.look_at
            watched.look_at = at + LOOK_STEPS if at < FREQUENT_STEPS else 2 * at
            self._look_at_gradients(groups, id(optimizer))
            self._look_at_weights(watched, optimizer, groups)
        if self._steps % LOOK_STEPS == 0:
            self.look(_torch_aids())
            self._look_at_threads()

    def look(self, aids: "dict[str, bool]") -> None:
        """aids: kind → whether it is on; those of Python are added. One that is on in nearly all looks is reported."""
        self._num_looks += 1
        for kind, is_on in {**_python_aids(), **aids}.items():
            self._looks[kind] = self._looks.get(kind, 0) + is_on
            if self._looks[kind] >= max(MIN_LOOKS, MIN_ON * self._num_looks):
                self.report(kind)
            else:
                self.withdraw(kind)

    def count(self, kind: str) -> int:
        """How often it was seen, with this time."""
        self._looks[kind] = self._looks.get(kind, 0) + 1
        return self._looks[kind]

    def _add(self, optimizer: "Any", groups: "Any") -> None:
        """An optimizer steps for the first time."""
        with_grad = (entry for entry in _parameters(groups) if entry[1].grad is not None)
        position, parameter = next((entry for entry in with_grad if _is_readable(entry[1].grad)), ((0, 0), None))
        if parameter is None:
            if self.count("no_gradients") == NO_GRADIENT_STEPS:
                self.report("no_gradients", _place_of(optimizer), steps=NO_GRADIENT_STEPS)
            return
        key = (id(parameter), tuple(parameter.shape))
        older, watched = self._owners.get(key), _Watched(optimizer, position)
        is_replaced = older is not None and older.optimizer() is None and older.steps <= MAX_REPLACED_STEPS
        if is_replaced and optimizer.state:  # what the older one knew is lost
            self._replaced += 1
            if self._replaced >= MIN_REPLACED:
                self.report("optimizer_again", _place_of(optimizer), steps=self._steps, optimizers=self._replaced)
        if len(self._watched) > 64:
            self._watched.clear()
            self._owners.clear()
        self._owners[key] = self._watched[id(optimizer)] = watched
        watched.sizes = self._first_sizes.pop(id(optimizer), {})

    def _look_at_weights(self, watched: "_Watched", optimizer: "Any", groups: "Any") -> None:
        first, last = GROWTH_STEPS
        if not watched.sizes or not first <= watched.steps <= last:
            return
        grown = [(size / watched.sizes[where], watched.sizes[where], size) for where, size in _sizes(groups)
                 if where in watched.sizes]  # fmt: skip
        factor, before, now = sorted(grown)[len(grown) // 2] if grown else (0.0, 0.0, 0.0)
        if factor >= MIN_WEIGHT_GROWTH:
            self.report(
                "weights_grow", _place_of(optimizer), steps=watched.steps, factor=factor, first=before, last=now,
                lr=float(groups[0].get("lr") or 0.0), optimizer=type(optimizer).__name__,
            )  # fmt: skip

    def _look_at_used(self, watched: "_Watched", groups: "Any") -> None:
        """Which parameters of an optimizer have had no gradient in any of the looks."""
        sizes = {where: parameter.numel() for where, parameter in _parameters(groups)}
        without = {
            where for where, parameter in _parameters(groups) if parameter.grad is None and parameter.requires_grad
        }
        watched.unused = without if watched.unused is None else without & watched.unused
        values, total = sum(sizes[where] for where in watched.unused), sum(sizes.values())
        are_most = 2 * len(watched.unused) >= len(sizes) and MIN_UNUSED * total <= values < total
        if watched.steps == USED_STEPS[-1] and are_most:  # few tensors are heads that have no loss
            unused, percent = len(watched.unused), round(100 * values / total)
            place = _place_of(watched.optimizer())
            self.report("unused_parameters", place, unused=unused, tensors=len(sizes), percent=percent)

    def _look_at_threads(self) -> None:
        self._cores = usable_cores() if self._cores is None else self._cores
        threads = sys.modules["torch"].get_num_threads()
        if self._cores and threads >= 2 * self._cores:
            self.report("torch_threads", threads=threads, cores=self._cores)
        else:
            self.withdraw("torch_threads")

    def _look_at_mode(self, is_trained: "Callable[[Any], bool]") -> None:
        alive = [(module(), place) for module, place in list(self._evaluated)]
        evaluated = [(module, place) for module, place in alive if module is not None and not module.training]
        wrong, place = next((entry for entry in evaluated if is_trained(entry[0])), (None, ""))
        if wrong is None:
            self._evaluated.clear()  # trained again, or it is another model
            self._eval_steps = 0
            return
        self._eval_steps += 1
        if self._eval_steps < LOOK_STEPS:
            return
        affected = sorted({type(module).__name__ for module in wrong.modules() if _differs_in_training(module)})
        self._evaluated.clear()
        if affected:
            self.report("eval_mode", place, step=self._steps, layers=", ".join(affected[:3]))

    def _look_at_gradients(self, groups: "Any", optimizer: int) -> None:
        gradients = [parameter.grad for _, parameter in _parameters(groups) if parameter.grad is not None]
        gradients = [grad.detach() for grad in gradients if _is_readable(grad) and grad.is_floating_point()]
        smallest = min(gradients, key=lambda grad: grad.numel(), default=None)
        if smallest is None:
            return
        total = float(smallest.reshape(-1)[:MAX_READ].float().abs().sum())  # in half precision, a sum may overflow
        found = {
            "non_finite_gradients": total - total != 0.0,
            "zero_gradients": total == 0.0 and not any(bool(grad.any()) for grad in gradients),
            "double_precision": str(smallest.dtype) == "torch.float64",
        }
        for kind, is_so in found.items():
            name = f"{kind} of {optimizer}"
            if is_so and self.count(name) >= MIN_LOOKS:
                self.report(kind, step=self._steps)
            elif not is_so and self._looks.pop(name, 0) >= MIN_LOOKS:
                self.withdraw(kind)

    def stop(self, error: BaseException) -> None:
        self.is_on = False
        report_failure("mistakes", error)


def _place_of(optimizer: "Any") -> str:
    """The line that made it; empty: not known, or the optimizer is gone."""
    return "" if optimizer is None else str(vars(optimizer).get(PLACE_ATTR, ""))


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


def usable_cores() -> float:
    """Cores that this process may use, by its affinity and the quota of its control group; 0: not known."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return 0.0
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, max(1.0, float(quota) / float(period)))


def _is_compiling() -> bool:
    """Whether torch.compile traces this code: nothing is looked at then."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(getattr(compiler, "is_compiling", bool)())


def _differs_in_training(module: "Any") -> bool:
    """Whether the module is in its mode for evaluation, and would work differently in a training."""
    name = type(module).__name__
    if module.training or not any(part in name for part in _TRAINS_ONLY):
        return False
    if "Norm" in name:
        return getattr(module, "running_mean", None) is not None
    return bool(getattr(module, "p", getattr(module, "drop_prob", 1.0)))


def _is_readable(grad: "Any") -> bool:
    """Whether its values can be read without an effect on the job: a part of a tensor on several devices would need all
    of them, a lazy one is computed for it, and nothing may be read while a CUDA graph is captured."""
    if type(grad).__name__ != "Tensor" or grad.is_sparse:
        return False
    return grad.device.type == "cpu" or (
        grad.device.type == "cuda" and not sys.modules["torch"].cuda.is_current_stream_capturing()
    )


def _parameters(groups: "Any") -> "Iterator[tuple[tuple[int, int], Any]]":
    """(group and index in it, parameter) of each of an optimizer."""
    return (((i, k), one) for i, group in enumerate(groups) for k, one in enumerate(group["params"]))


def _sizes(groups: "Any") -> "Iterator[tuple[tuple[int, int], float]]":
    """(position, mean size of the values) of the first few matrices of an optimizer that have gradients."""
    weights = ((where, one.detach()) for where, one in _parameters(groups) if one.dim() >= 2 and one.grad is not None)
    readable = ((where, one) for where, one in weights if _is_readable(one) and one.is_floating_point())
    for where, weight in islice(readable, WEIGHTS):
        yield where, float(weight.reshape(-1)[:MAX_READ].float().abs().mean())


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
    found = set()
    for node in _nodes(tensors, MAX_LOSS_NODES):
        name = _operation(node)
        if _compares_all_pairs(node, name):
            found.add("outer_loss")
        given = _before(node) if name.startswith("NllLoss") or name == _SIGMOID_LOSS else None
        before = "" if given is None else _operation(given)
        if name == _SIGMOID_LOSS:
            found |= {"sigmoid_twice"} if before in _PROBABILITIES else set()
        elif before in _PROBABILITIES:
            found.add("nll_of_probabilities")
        elif before in _LAYERS:
            found.add("raw_nll")
        elif given is not None and before == "LogSoftmax":
            first = _before(given)
            found |= {"softmax_twice"} if first is not None and _operation(first) in _PROBABILITIES else set()
            found |= {"one_class"} if _classes_of(given) == 1 else set()
    return found


def _compares_all_pairs(node: "Any", name: str) -> bool:
    """Whether n predictions are compared with the targets of all n samples: sizes (n, 1) and (n,) make (n, n)."""
    if name in _COMPARISONS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        name = _operation(node)
    operands = [following for following, _ in node.next_functions if following is not None]
    shape = _shape(node)
    if name not in ("Sub", "Expand") or len(operands) != 1 or len(shape) != 2 or not shape[0] == shape[1] > 1:
        return False
    given = _shape(operands[0])
    is_column = given == (shape[0], 1) and _operation(operands[0]) not in _RESHAPES  # else it is meant
    return is_column or (name == "Expand" and given == (shape[0],))


def _shape(node: "Any") -> "tuple[int, ...]":
    """The shape of the result of an operation; empty: not known."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(int(size) for size in metadata[0].shape) if metadata else ()


def _num_classes(tensors: "Any") -> int:
    """Classes of a loss that is one cross-entropy; 0: it is another one, or several."""
    losses = [node for node in _nodes(tensors, MAX_LOSS_NODES) if _operation(node).startswith("NllLoss")]
    given = _before(losses[0]) if len(losses) == 1 else None
    return 0 if given is None or _operation(given) != "LogSoftmax" else _classes_of(given)


def _classes_of(node: "Any") -> int:
    """Classes of a softmax, by its shape alone: reading a saved tensor would run the job's hooks. 0: not known."""
    shape, dimension = _shape(node), int(getattr(node, "_saved_dim", -1))
    if not shape:
        return 0
    return int(shape[dimension if dimension < len(shape) else dimension - (1 << 64)])  # torch keeps it unsigned


def own_line() -> str:
    """FILE:LINE of the innermost frame that is not of a library; the file relative to the working directory if it is
    below that, as in the places of stacks."""
    try:
        folder = os.getcwd().rstrip("/") + "/"
    except OSError:  # it was removed
        folder = "/"
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if "__autograph_generated" in name:
            name, line = _source_line(frame)
        if not name.startswith("<") and not NOT_OWN.search(name):
            name = name[len(folder) :] if folder != "/" and name.startswith(folder) else name
            return f"{name}:{line}"
        frame = frame.f_back
    return ""


def _source_line(frame: "Any") -> "tuple[str, int]":
    """(file, line) of the source of a function that TensorFlow's AutoGraph has rewritten, by the map that it keeps;
    ("<generated>", 0): there is none."""
    generated = (frame.f_code.co_filename, frame.f_lineno)
    above = frame.f_back
    while above is not None:
        sources = getattr(above.f_locals.get("converted_f"), "ag_source_map", None) or {}
        for place, origin in sources.items():
            if (place.filename, place.lineno) == generated:
                return origin.loc.filename, origin.loc.lineno
        above = above.f_back
    return "<generated>", 0
