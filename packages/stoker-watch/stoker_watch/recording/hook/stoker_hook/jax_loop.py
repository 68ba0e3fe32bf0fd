"""Hook for JAX: its compilations, by the listeners of `jax.monitoring`, and why they are repeated, by its log. JAX has
no optimizer or loader that could be timed: all other time stays `startup`, which the watcher shows as unattributed
once the job prints steps."""

import atexit
import logging
import re
from sys import modules
from typing import Any

from .clock import COMPILE, RECOMPILED_S, RECOMPILES, STARTUP, clock
from .failures import report_failure
from .mistakes import MIN_LOOKS

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""As JAX reports a compilation by XLA (jax/_src/dispatch.py, since 0.4.1); `fun_name` since 0.4.36."""
MAX_FUNCTIONS = 10_000
EXPLAIN, MISS = "jax_explain_cache_misses", "TRACING CACHE MISS"
"""Setting with which JAX logs why it traces again, since 0.4.24, and how these records begin."""
MISS_LOGGERS = ("jax._src.interpreters.partial_eval", "jax._src.pjit")
MAX_MISSES = 20
"""Records after which the setting is off again: each takes time."""
_NOISE = re.compile(r"<class 'jax\._src\.tree_util\.Static'> with pytree metadata |, so the pytree node .* match$")
AIDS = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks")
"""Settings of `jax.config` that slow each step, and kinds of mistakes."""


def patch_monitoring(module: "Any") -> None:
    """jax._src.monitoring."""
    counts: dict[str, int] = {}
    repeated_s: dict[str, float] = {}
    misses = _Misses()

    def on_duration(event: str, duration: float, **data: "Any") -> None:
        if event != COMPILE_EVENT or not clock.enabled:
            return
        try:
            process = modules.get("multiprocessing.process")
            if clock.has_stepped or (process is not None and process.parent_process() is not None):
                return  # torch or TensorFlow trains here, or a loader worker compiles
            _look_for_aids(MIN_LOOKS)
            version = getattr(modules.get("jax"), "__version__", "")
            clock.publish(f"jax {version}".rstrip())
            clock.update()
            values, seconds = clock.values, max(0.0, min(float(duration), clock.values[STARTUP]))
            values[STARTUP] -= seconds
            values[COMPILE] += seconds
            if isinstance(name := data.get("fun_name"), str) and (name in counts or len(counts) < MAX_FUNCTIONS):
                counts[name] = counts.get(name, 0) + 1
                values[RECOMPILES] = max(0.0, values[RECOMPILES]) + (counts[name] > 1)
                if counts[name] > 1:
                    repeated_s[name] = repeated_s.get(name, 0.0) + seconds
                    values[RECOMPILED_S] = max(values[RECOMPILED_S], repeated_s[name])
                    misses.ask()
                    if counts[name] == max(counts.values()):
                        function = name[4:-1] if name.startswith("jit(") else name
                        clock.set_recompiled(function, misses.why.get(function, ""))
        except Exception as error:  # noqa: BLE001 (the job goes on without this clock)
            clock.disable("jax", error)

    atexit.register(_look_for_aids, 1)  # without compilations, the end is the only time to look
    module.register_event_duration_secs_listener(on_duration)


class _Misses(logging.Filter):
    """Why functions are traced again, as JAX logs it; these records are kept from the job's output, unless the job has
    asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}
        self._left = MAX_MISSES
        self._asked = False

    def ask(self) -> None:
        config: Any = getattr(modules.get("jax"), "config", None)
        if not self._asked and getattr(config, EXPLAIN, None) is False:
            for name in MISS_LOGGERS:
                logging.getLogger(name).addFilter(self)
            config.update(EXPLAIN, True)
        self._asked = True

    def filter(self, record: "Any") -> bool:
        try:
            text = record.getMessage()
            if not self._left or not text.startswith(MISS):
                return True
            self._keep(text)
        except Exception as error:  # noqa: BLE001 (the job goes on)
            report_failure("recompilations", error)
        return False

    def _keep(self, text: str) -> None:
        self._left -= 1
        if self._left == 0:
            modules["jax"].config.update(EXPLAIN, False)
        lines = [line.strip() for line in text.splitlines()]
        at = re.match(rf"{MISS} at (.*?):(\d+)", lines[0])
        matches = (re.match(r"(?:for )?(\S+) (?:id=\d+ )?defined at", line) for line in lines[1:])
        named = next(filter(None, matches), None)
        if named is None:
            return
        differs = [line[2:] for line in lines if line.startswith("* ")]
        again = [line for line in lines if line.startswith("but seen another function")]
        if why := "; ".join(differs) or (again and "another function of the same line was compiled before"):
            called = f" (called at {at[1].rpartition('/')[2]}:{at[2]})" if at else ""
            self.why[named[1]] = f"{_NOISE.sub('', why)}{called}"


def _look_for_aids(looks: int) -> None:
    """Reports settings for debugging that were on in so many looks: a part of the job may turn one on for a while."""
    try:
        config = getattr(modules.get("jax"), "config", None)
        for kind in AIDS:
            if clock.is_published and getattr(config, kind, False) and clock.mistakes.count(kind) >= looks:
                clock.mistakes.report(kind)
    except Exception as error:  # noqa: BLE001 (the job goes on)
        report_failure("jax", error)
