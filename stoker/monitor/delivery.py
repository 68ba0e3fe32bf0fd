"""Tells of an alert: an event of the run, a command, a webhook, the end of the run. In the order in which they came.

Commands and webhooks run on a thread of their own and may take their time; what could not be told is a warning of the
run, of which no rule tells in turn. Not here: when something is to be told (`alerts.py`).
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
"""Longest that a command, and one try of a webhook, may take."""
MAX_ATTEMPTS = 3
MAX_PENDING = 100
"""Alerts that wait for delivery at most: one whose address hangs must not fill the memory."""


class Delivery:
    """Passes alerts on until `close`. stop: ends the run, as a signal would."""

    def __init__(self, folder: RunFolder, options: MonitoringOptions, stop: Callable[[], None]) -> None:
        self._folder = folder
        self._command = options.alert_command
        self._webhook = options.webhook_url()
        self._stop = stop if options.alert_exit else None
        self._pending: queue.Queue[Alert | None] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
        self._thread.start()

    def notify(self, alert: Alert) -> None:
        """Never waits."""
        self._folder.event("alert", alert.text, rule=alert.rule, value=alert.value)
        if self._command is not None or self._webhook is not None:
            try:
                self._pending.put_nowait(alert)
            except queue.Full:
                self._warn(f"not told of, {MAX_PENDING} others wait: {alert.text}")
        if self._stop is not None:
            self._stop()

    def close(self) -> None:
        """Gives what waits the time of one command and one webhook."""
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
        payload = json.dumps({"rule": alert.rule, "text": alert.text, "value": alert.value, "t": alert.t,
                           "run": str(self._folder.path.absolute())})  # fmt: skip
        try:
            completed = subprocess.run(
                command, shell=True, input=payload.encode(), timeout=COMMAND_TIMEOUT_S, check=False, capture_output=True,
                env=os.environ | {"STOKER_ALERT": alert.text, "STOKER_RUN": str(self._folder.path.absolute())},
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # which would quote the command, and what secrets are in it
            self._warn(f"the command of an alert was ended after {COMMAND_TIMEOUT_S:.0f} s")
            return
        except OSError as error:
            self._warn(f"the command of an alert failed: {error}")
            return
        if completed.returncode != 0:
            stderr_tail = completed.stderr.decode(errors="replace").strip()[-500:]
            self._warn(f"the command of an alert ended with {completed.returncode}: {stderr_tail}")

    def _post_webhook(self, url: str, alert: Alert) -> None:
        """As Slack's incoming webhooks want it: {"text": …}; Mattermost, Discord (…/slack) and Teams take the same."""
        body = json.dumps({"text": f"stoker: {self._folder.path.name} on {os.uname().nodename}: {alert.text}"}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                cause = f"{error.code} {error.reason}"  # never the address, which is a secret
                if error.code < 500 and error.code != 429:
                    break
            except OSError as error:
                cause = str(getattr(error, "reason", error))
            except (http.client.HTTPException, ValueError) as error:  # an odd answer, or an address that is none
                cause = type(error).__name__
            if attempt < MAX_ATTEMPTS:
                time.sleep(2.0**attempt)
        self._warn(f"an alert could not be posted: {cause}")

    def _warn(self, text: str) -> None:
        self._folder.event("warning", text, **{ALERT_DELIVERY: True})
