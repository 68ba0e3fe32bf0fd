"""Monitoring options: flags of `stoker train` and `stoker watch`, arguments of `stoker_watch.measure`.

They are not settings of the training: config.toml does not contain them, and a resumed run may use others.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Literal

from stoker_watch.errors import ConfigError, make_error

if TYPE_CHECKING:
    from stoker_watch.monitor.alerts import Rule

WEBHOOK_VARIABLE = "STOKER_ALERT_WEBHOOK"
"""Holds the address of the webhook: other users of the machine can read command lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """By default nothing is enabled."""

    alert: tuple[str, ...] = ()
    """Rules such as 'idle > 30% for 5min', 'host_memory > 95%', 'seconds_since_step > 10min', 'on failed'
    (docs/watch.md)."""
    alert_command: str | None = None
    """Shell command to run for each alert; it gets the alert as JSON on stdin and its text in STOKER_ALERT."""
    alert_webhook: str | None = None
    """URL that each alert is posted to in Slack's format; default: the variable STOKER_ALERT_WEBHOOK."""
    alert_exit: bool = False
    """Also stop the run at an alert, as SIGTERM does: training saves its state and exits with code 75."""
    metrics_port: int | None = None
    """Port for Prometheus, http://HOST:PORT/metrics; 0: a free port, which an event reports."""
    metrics_host: str = "127.0.0.1"
    """Address of that port; 0.0.0.0: all interfaces, so that other machines can read the metrics."""
    track: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers to log losses, speed, phases and metrics to: wandb, mlflow. Each reads its own variables."""

    def rules(self) -> "list[Rule]":
        """The parsed alert rules. Raises ConfigError for an invalid one."""
        from stoker_watch.monitor.alerts import parse_rule  # the command line imports this module at every start

        return [parse_rule(text) for text in self.alert]

    def webhook_url(self) -> str | None:
        return self.alert_webhook or os.environ.get(WEBHOOK_VARIABLE) or None

    def validate(self) -> None:
        """Raises ConfigError for options that do not fit together."""
        rules = self.rules()
        actions = ("alert_command", "alert_webhook", "alert_exit")
        action_flags = [f"--{name.replace('_', '-')}" for name in actions if getattr(self, name)]
        if action_flags and not rules:
            raise make_error(ConfigError, "alert-action-without-rule", action=action_flags[0])
        webhook = self.webhook_url()
        if rules and webhook is not None and not webhook.startswith(("http://", "https://")):
            raise ConfigError("The address of the webhook is not an HTTP URL.", choices=["https://…", "http://…"])
        if self.metrics_port is None and self.metrics_host != "127.0.0.1":
            raise ConfigError("--metrics-host has no effect without --metrics-port.", fix="--metrics-port 0")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise make_error(ConfigError, "no-metrics-port", port=self.metrics_port)
