"""Delivers alerts: an event of the run, a command, a webhook, the end of the run. In the order of their arrival.

Commands and webhooks run on a separate thread and may be slow. A failed delivery is a warning event, which triggers no
rule itself. When an alert fires is decided in `alerts.py`.
"""

import http.client
import json
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from stoker.monitor.alerts import ALERT_DELIVERY, Alert
from stoker.monitor.options import MonitoringOptions
from stoker.runs.records import RunFolder

COMMAND_TIMEOUT_S, WEBHOOK_TIMEOUT_S = 60.0, 10.0
"""Timeouts of a command, and of one attempt of a webhook."""
MAX_ATTEMPTS = 3
MAX_PENDING = 100
"""Maximum number of queued alerts: an address that hangs must not fill the memory."""


class Delivery:
    """Delivers alerts until `close`. stop: ends the run, as a signal does."""

    def __init__(self, folder: RunFolder, options: MonitoringOptions, stop: Callable[[], None]) -> None:
        self._folder = folder
        self._command = options.alert_command
        self._webhook = options.webhook_url()
        self._stop = stop if options.alert_exit else None
        self._pending: queue.Queue[Alert | None] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
        self._thread.start()

    def notify(self, alert: Alert) -> None:
        """Records the alert and queues its delivery. Never blocks."""
        self._folder.event("alert", alert.text, rule=alert.rule, value=alert.value)
        if self._command is not None or self._webhook is not None:
            try:
                self._pending.put_nowait(alert)
            except queue.Full:
                self._warn(f"alert not delivered, {MAX_PENDING} others are queued: {alert.text}")
        if self._stop is not None:
            self._stop()

    def close(self) -> None:
        """Waits for queued alerts, at most as long as one command and one webhook may take."""
        try:
            self._pending.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(COMMAND_TIMEOUT_S + WEBHOOK_TIMEOUT_S)

    def _deliver(self) -> None:
        while (alert := self._pending.get()) is not None:
            if self._command is not None:
                self._run_command(self._command, alert)
            if self._webhook is not None:
                self._post_webhook(self._webhook, alert)

    def _run_command(self, command: str, alert: Alert) -> None:
        run = str(self._folder.path.absolute())
        payload = {"rule": alert.rule, "text": alert.text, "value": alert.value, "t": alert.t, "run": run}
        try:
            completed = subprocess.run(
                command,
                shell=True,
                input=json.dumps(payload).encode(),
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                capture_output=True,
                env=os.environ | {"STOKER_ALERT": alert.text, "STOKER_RUN": run},
            )
        except subprocess.TimeoutExpired:  # its text quotes the command, which may contain secrets
            self._warn(f"the command of an alert was stopped after {COMMAND_TIMEOUT_S:.0f} s")
            return
        except OSError as error:
            self._warn(f"the command of an alert failed: {error}")
            return
        if completed.returncode != 0:
            stderr_tail = completed.stderr.decode(errors="replace").strip()[-500:]
            self._warn(f"the command of an alert ended with {completed.returncode}: {stderr_tail}")

    def _post_webhook(self, url: str, alert: Alert) -> None:
        """The format of Slack's incoming webhooks, {"text": …}; Mattermost, Discord (…/slack) and Teams accept it
        too."""
        body = json.dumps({"text": f"stoker: {self._folder.path.name} on {os.uname().nodename}: {alert.text}"}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                cause = f"{error.code} {error.reason}"  # without the address, which is a secret
                if error.code < 500 and error.code != 429:
                    break
            except OSError as error:
                cause = str(getattr(error, "reason", error))
            except (http.client.HTTPException, ValueError) as error:  # an invalid response, or an invalid address
                cause = type(error).__name__
            if attempt < MAX_ATTEMPTS:
                time.sleep(2.0**attempt)
        self._warn(f"an alert could not be posted: {cause}")

    def _warn(self, text: str) -> None:
        self._folder.event("warning", text, **{ALERT_DELIVERY: True})
