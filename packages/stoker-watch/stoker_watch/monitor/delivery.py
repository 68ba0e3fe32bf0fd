"""Delivers alerts: an event of the run, a command, a webhook, the end of the run. In the order of their arrival.

Commands and webhooks run on a separate thread and may be slow; at the end of the run they get a few seconds. A failed
delivery is a warning event, which triggers no rule itself. When an alert fires is decided in `alerts.py`.
"""

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from stoker_watch.findings.finding import Finding
from stoker_watch.monitor.alerts import ALERT_DELIVERY, Alerts, RecordLine
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.runs.records import RunFolder
from stoker_watch.secrets import mask_secrets
from stoker_watch.storage.web import open_url

COMMAND_TIMEOUT_S, WEBHOOK_TIMEOUT_S = 60.0, 10.0
"""Timeouts of a command, and of one attempt of a webhook."""
CLOSE_TIMEOUT_S, KILL_TIMEOUT_S = 4.5, 0.5
"""How long alerts are still delivered at the end of the run; then a command is killed, and has this time to end."""
MAX_ATTEMPTS, RETRY_BASE_S = 3, 2.0
"""Attempts of a webhook; before the next one it waits RETRY_BASE_S to the power of their number."""
MAX_PENDING = 100
"""Maximum number of queued alerts: an address that hangs must not fill the memory."""
MAX_STDERR_BYTES = 500
"""Quoted bytes at the end of what a failed command printed."""


class Delivery:
    """Delivers alerts until `close`. stop: ends the run, as a signal does; say: prints a line."""

    def __init__(
        self,
        folder: RunFolder,
        options: MonitoringOptions,
        alerts: Alerts,
        stop: Callable[[], None],
        say: Callable[[str], object],
    ) -> None:
        self._folder = folder
        self._alerts, self._say = alerts, say
        self._command = options.alert_command
        self._webhook = options.webhook_url()
        self._stop = stop if options.alert_exit else None
        self._pending: queue.SimpleQueue[tuple[Finding, float] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_delivering = False
        self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
        self._thread.start()

    def observe(self, line: RecordLine) -> None:
        """Records the alerts that a line fires, and queues their delivery. Never blocks."""
        for alert in self._alerts.observe(line):
            self._folder.event("alert", alert.title, rule=alert.id, value=_value(alert))
            self._say(f"alert: {alert.title}")
            if self._command is not None or self._webhook is not None:
                if self._pending.qsize() < MAX_PENDING:
                    self._pending.put((alert, line.t))
                else:
                    self._warn(f"alert not delivered, {MAX_PENDING} others are queued: {alert.title}")
            if self._stop is not None:
                self._stop()

    def close(self) -> None:
        """Waits for queued alerts, at most CLOSE_TIMEOUT_S + KILL_TIMEOUT_S."""
        self._pending.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._closed.set()
        if self._process is not None:
            _kill_group(self._process)
        self._thread.join(KILL_TIMEOUT_S)
        undelivered = max(0, self._pending.qsize() - 1) + self._is_delivering
        if undelivered:  # a webhook that hangs is abandoned: its thread is a daemon
            limit = f"{CLOSE_TIMEOUT_S:.1f} s after the end of the run"
            self._warn(f"{undelivered} alerts were not delivered within {limit}")

    def _deliver(self) -> None:
        while not self._closed.is_set() and (pending := self._pending.get()) is not None:
            self._is_delivering = True
            alert, t = pending
            if self._command is not None:
                self._run_command(self._command, alert, t)
            if self._webhook is not None:
                self._post_webhook(self._webhook, alert)
            self._is_delivering = self._closed.is_set()

    def _run_command(self, command: str, alert: Finding, t: float) -> None:
        run = str(self._folder.path.absolute())
        payload = {"rule": alert.id, "text": alert.title, "value": _value(alert), "t": t, "run": run}
        with tempfile.TemporaryFile() as stderr:  # not a pipe: a child of the command that goes on may hold it open
            try:
                process = self._process = subprocess.Popen(
                    ["/bin/sh", "-c", command],  # the user's own command, on the command line of stoker
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=os.environ | {"STOKER_ALERT": alert.title, "STOKER_RUN": run},
                    start_new_session=True,
                )
                process.communicate(json.dumps(payload).encode(), timeout=COMMAND_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # its text quotes the command, which may contain secrets
                _kill_group(process)
                process.wait()
                self._warn(f"the command of an alert was stopped after {COMMAND_TIMEOUT_S:.0f} s")
                return
            except OSError as error:
                self._warn(f"the command of an alert failed: {error}")
                return
            finally:
                self._process = None
            if process.returncode != 0:
                size = stderr.seek(0, os.SEEK_END)
                stderr.seek(max(0, size - MAX_STDERR_BYTES))
                tail = mask_secrets(stderr.read().decode(errors="replace").strip())
                self._warn(f"the command of an alert ended with {process.returncode}: {tail}")

    def _post_webhook(self, url: str, alert: Finding) -> None:
        """The format of Slack's webhooks, {"text": …}, which Mattermost, Discord (…/slack) and Teams accept."""
        text = f"stoker: {self._folder.path.name} on {os.uname().nodename}: {alert.title}"
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with open_url(request, timeout_s=WEBHOOK_TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                cause = f"{error.code} {error.reason}"  # without the address, which is a secret
                if error.code < 500 and error.code != 429:
                    break
            except OSError as error:
                cause = str(getattr(error, "reason", error))
            except (http.client.HTTPException, ValueError) as error:  # an invalid response, or an invalid address
                cause = type(error).__name__
            if attempt < MAX_ATTEMPTS and self._closed.wait(RETRY_BASE_S**attempt):
                break
        self._warn(f"an alert could not be posted: {cause}")

    def _warn(self, text: str) -> None:
        if self._closed.is_set() and threading.current_thread() is self._thread:
            return  # `close` reports it: the run's records may be closed by now
        self._folder.event("warning", text, **{ALERT_DELIVERY: True})


def _value(alert: Finding) -> float | None:
    return alert.evidence[0].value if alert.evidence else None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and its children, which are in a session of their own."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
