"""A rank that `local_ranks.py` started: `python -m stoker.cli.rank_process`, with a `RankRequest` on stdin.

Its error is left in the folder of reports, for the process that started it; its exit code is that of the error.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from stoker.cli.quick_import import quick_imports
from stoker.config.settings import from_fields
from stoker.training.local_ranks import RankRequest
from stoker.training.ranks import REPORTS_VARIABLE, RankFailure, write_report
from stoker_watch.errors import Preempted, StokerError

ORPHAN_GRACE_S = 60.0
"""How long a rank may save its state after the process that started it has gone."""


def main() -> int:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # until the training handles them
        signal.signal(signum, lambda *_: os._exit(Preempted.exit_code))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankRequest)
    try:
        threading.Thread(target=_end_with_starter, args=(sys.stdin.buffer,), name="starter", daemon=True).start()
        with quick_imports():
            from stoker.training.run import train
            from stoker_watch.recording.telemetry.host import process_start_s
        config = from_fields(request.settings)
        result = train(config, request.options, started_s=process_start_s(), exit_when_hung=True)
    except StokerError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001  # the process that started this one prints it
        _report(error)
        return 1
    if os.environ["LOCAL_RANK"] == "0":  # the first one of each machine, for the process that started it
        result.write(Path(os.environ[REPORTS_VARIABLE]))
    return 0


def _report(error: Exception) -> None:
    """Unless `ranks.py` has done it, which knows whether another rank ended before."""
    rank = os.environ["RANK"]
    if not Path(os.environ[REPORTS_VARIABLE], f"failure-{rank}.json").exists():
        write_report(RankFailure.of(int(rank), error))


def _end_with_starter(pipe: BinaryIO) -> None:
    """Saves and ends this process when the other end of the pipe is closed: the process that started it has gone."""
    while pipe.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a communication that failed would wait for it
