"""Carries one stream of a job's output to where it belongs, and into the run's output.log. A program of its own.

The job writes into a pipe or a terminal of ours (a pty). Whoever reads that must not die before the job: a pipe without
a reader kills its writer. So the keeper is two processes: one copies, the other, the spare, waits; each sees the death
of the other at the end of a socket, and replaces it. The watcher, the keeper, or one after the other may be killed, and
the job goes on with its whole output; only what a killed keeper had in its hands (at most 64 KiB) is lost.

It is started by `watch.py` with descriptors 0: the job's output, 1: where it goes, 3: the run's lock, which keeps the
run live until the job's output ends, 4: a pipe to the watcher: a byte says that the keeper is there, its end that all
is written. Only the standard library, so that it starts in some 20 ms.
"""

import errno
import fcntl
import os
import select
import signal
import socket
import sys
import termios

CHUNK_BYTES = 65536
MAX_LOG_BYTES = 32 * 2**20
"""Size from which on output.log becomes output.1.log, replacing the one before: the newest 32 to 64 MiB are kept."""

IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""They are meant for the job, or for the whole process group; the keeper ends with the job's output."""


class RotatingLog:
    """output.log, appended to by the keepers of a run. What cannot be written is counted, and said there later."""

    def __init__(self, path: str, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = -1
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        try:
            self._open()
            if self._dropped_bytes:
                notice = f"\n[stoker: {self._dropped_bytes} bytes of the output could not be written here]\n".encode()
                _write_all(self._fd, notice)
                self._dropped_bytes = 0
            _write_all(self._fd, data)
        except OSError:  # a full disk, a storage that went away: the job must not notice
            self._dropped_bytes += len(data)

    def _open(self) -> None:
        """Opens the log, and begins a new one where it is too long or another keeper has begun one."""
        if self._fd >= 0:
            status = os.fstat(self._fd)
            if status.st_size < self._max_bytes and status.st_nlink:
                return
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.path.exists(self._path) and os.path.samestat(status, os.stat(self._path)):
                stem, suffix = os.path.splitext(self._path)
                os.replace(self._path, f"{stem}.1{suffix}")
            os.close(self._fd)
        self._fd = -1
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def relay(source: int, target: int, log: RotatingLog, standby: socket.socket) -> bool:
    """Copies until the job's output ends (True) or the spare dies (False). A target that is a pipe which nobody reads
    ends it too: the job then meets a broken pipe, as it would without us."""
    while True:
        ready, _, _ = select.select([source, standby.fileno()], [], [])
        if source not in ready:
            return False
        try:
            data = os.read(source, CHUNK_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # the end of a pty
                raise
            return True
        if not data:
            return True
        log.write(data)
        try:
            _write_all(target, data)
        except BrokenPipeError:
            return True
        except OSError:  # a terminal that was closed, a full disk: the job is not to end by it
            pass


def run_relay(source: int, target: int, log: RotatingLog) -> None:
    """Both roles, until the output has ended."""
    while True:
        relay_end, standby_end = socket.socketpair()
        if os.fork():
            standby_end.close()
            if relay(source, target, log, relay_end):
                relay_end.send(b"done")
                return
            relay_end.close()  # the spare died: another is made
        else:
            relay_end.close()
            if standby_end.recv(8):
                return
            standby_end.close()  # the keeper died: its spare takes its place


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[os.write(fd, remaining) :]
        except BlockingIOError:  # someone made it non-blocking for all who have it
            select.select([], [fd], [])


def sync_terminal_size(source: int, target: int) -> None:
    """Gives the job's terminal the size of the real one."""
    if os.isatty(source) and os.isatty(target):
        size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def main() -> None:
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGWINCH, lambda *_: sync_terminal_size(0, 1))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a spare
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.closerange(5, os.sysconf("SC_OPEN_MAX"))
    os.write(4, b".")  # ready: the job may start
    run_relay(0, 1, RotatingLog(sys.argv[1]))


if __name__ == "__main__":
    main()
