"""Hook for JAX: its compilations, by the listeners of `jax.monitoring`. JAX has no optimizer or loader that could be
timed: all other time stays `startup`, which the watcher shows as unattributed once the job prints steps."""

import atexit
from sys import modules
from typing import Any

from .clock import COMPILE, RECOMPILED_S, RECOMPILES, STARTUP, clock
from .failures import report_failure
from .mistakes import MIN_LOOKS

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""As JAX reports a compilation by XLA (jax/_src/dispatch.py, since 0.4.1); `fun_name` since 0.4.36."""
MAX_FUNCTIONS = 10_000
AIDS = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks")
"""Settings of `jax.config` that slow each step, and kinds of mistakes."""


def patch_monitoring(module: "Any") -> None:
    """jax._src.monitoring."""
    counts: dict[str, int] = {}
    repeated_s: dict[str, float] = {}

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
                if counts[name] > 1 and counts[name] == max(counts.values()):
                    clock.set_recompiled(name)
        except Exception as error:  # noqa: BLE001 (the job goes on without this clock)
            clock.disable("jax", error)

    atexit.register(_look_for_aids, 1)  # without compilations, the end is the only time to look
    module.register_event_duration_secs_listener(on_duration)


def _look_for_aids(looks: int) -> None:
    """Reports settings for debugging that were on in so many looks: a part of the job may turn one on for a while."""
    try:
        config = getattr(modules.get("jax"), "config", None)
        for kind in AIDS:
            if clock.is_published and getattr(config, kind, False) and clock.mistakes.count(kind) >= looks:
                clock.mistakes.report(kind)
    except Exception as error:  # noqa: BLE001 (the job goes on)
        report_failure("jax", error)
