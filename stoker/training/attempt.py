"""What the loop of one attempt and its services share."""

import dataclasses

from stoker.profiling.ledger import Ledger
from stoker.profiling.trace import Tracer
from stoker.report.terminal import Screen
from stoker.training.parallel import One
from stoker.training.state import EventLogger, TrainSetup, TrainState
from stoker.training.watchdog import HangDetector


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One attempt of a run. Only the training thread uses it, except where a class says otherwise."""

    setup: TrainSetup
    parallel: One
    """What the processes of this training exchange."""
    ledger: Ledger
    tracer: Tracer
    hang_detector: HangDetector
    screen: Screen
    log_event: EventLogger

    @property
    def state(self) -> TrainState:
        return self.setup.state
