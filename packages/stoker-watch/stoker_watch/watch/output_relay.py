"""Forwards one stream of a job's output to its destination and into the run's output.log. A separate program.

The job writes into a pipe or a pty of `stoker watch`. The reader must not die before the job: a pipe without a reader
kills its writer. So the relay is two processes: one copies, the other is on standby; each detects the death of the
other at the end of a socket, and replaces it. The watcher or one relay process at a time may be killed: the job
continues with its whole output, except for the data that a killed process had in memory (at most 64 KiB).

`watch.py` starts it with descriptors 0: the job's output, 1: its destination, the run's lock, which is held until the
job's output ends, and a pipe to the watcher, whose number is an argument: a byte means that the relay is ready, its end
that all is written. Only the standard library, so that it starts in some 20 ms.
"""

import errno
import fcntl
import os
import select
import signal
import socket
import stat
import sys
import termios

CHUNK_BYTES = 65536
MAX_LOG_BYTES = 32 * 2**20
"""At this size output.log is renamed to output.1.log, replacing that file: the newest 32 to 64 MiB are kept."""

IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""They are for the job, or for the whole process group; the relay ends with the job's output."""


class RotatingLog:
    """output.log, written by the relays of a run. Bytes that cannot be written are counted and noted there later."""

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
        except OSError:  # a full disk, a storage that is gone: the job must not notice
            self._dropped_bytes += len(data)

    def _open(self) -> None:
        """Opens the log; starts a new one if it is too long or another relay has started one."""
        if self._fd >= 0:
            status = os.fstat(self._fd)
            if status.st_size < self._max_bytes and status.st_nlink:
                return
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.path.lexists(self._path) and os.path.samestat(status, os.lstat(self._path)):
                stem, suffix = os.path.splitext(self._path)
                os.replace(self._path, f"{stem}.1{suffix}")
            os.close(self._fd)
        self._fd = -1
        # not through a link, and a FIFO without a reader is an error; the file that is open cannot become another
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no file", self._path)
        self._fd = fd


def relay(source: int, target: int, log: RotatingLog, standby: socket.socket) -> bool:
    """Copies until the output ends or the target pipe has no reader (True), or the standby process dies (False)."""
    while True:
        ready, _, _ = select.select([source, standby.fileno()], [], [])
        if source not in ready:
            return False
        try:
            data = os.read(source, CHUNK_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # end of a pty
                raise
            return True
        if not data:
            return True
        log.write(data)
        try:
            _write_all(target, data)
        except BrokenPipeError:
            return True
        except OSError:  # a closed terminal, a full disk: must not end the job
            pass


def run_relay(source: int, target: int, log: RotatingLog) -> None:
    """Runs both roles until the output has ended."""
    while True:
        relay_end, standby_end = socket.socketpair()
        if os.fork():
            standby_end.close()
            if relay(source, target, log, relay_end):
                relay_end.send(b"done")
                return
            relay_end.close()  # the standby process died: start another
        else:
            relay_end.close()
            if standby_end.recv(8):
                return
            standby_end.close()  # the relay died: take over


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[os.write(fd, remaining) :]
        except BlockingIOError:  # another process made it non-blocking
            select.select([], [fd], [])


def sync_terminal_size(source: int, target: int) -> None:
    """Sets the size of the job's terminal to that of the real one."""
    if os.isatty(source) and os.isatty(target):
        size = fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)


def main() -> None:
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGWINCH, lambda *_: sync_terminal_size(0, 1))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # standby processes are not waited for
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.write(int(sys.argv[2]), b".")  # ready: the job may start
    run_relay(0, 1, RotatingLog(sys.argv[1]))


if __name__ == "__main__":
    main()
