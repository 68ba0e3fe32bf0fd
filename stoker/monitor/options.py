"""What a person asks for beside a run: flags of `stoker train` and `stoker watch`, arguments of `stoker.measure`.

They are no settings of the training: they are not part of config.toml, and a continued run may have others.
"""

import dataclasses
import os
from typing import Annotated, Literal

from cyclopts import Parameter

from stoker.errors import ConfigError
from stoker.monitor.alerts import Rule, parse_rule

WEBHOOK_VARIABLE = "STOKER_ALERT_WEBHOOK"
"""For the address without putting it on the command line, where every user of the machine can read it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringOptions:
    """Nothing is asked for by default."""

    alert: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """Rules such as 'idle > 30% for 5min', 'host_memory > 95%', 'silence > 10min', 'on failed' (docs/monitoring.md)."""
    alert_command: str | None = None
    """Run by the shell for each alert: the alert as JSON on stdin, STOKER_ALERT its text."""
    alert_webhook: str | None = None
    """Address that each alert is posted to, as Slack wants it; default: the variable STOKER_ALERT_WEBHOOK."""
    alert_exit: Annotated[bool, Parameter(negative=())] = False
    """An alert also stops the run, as SIGTERM does: training saves its state and exits with 75."""
    metrics_port: int | None = None
    """Port for Prometheus, http://HOST:PORT/metrics, on all interfaces; 0 takes a free one and says which."""
    track: Annotated[tuple[Literal["wandb", "mlflow"], ...], Parameter(consume_multiple=True)] = ()
    """Experiment trackers that get losses, speed, phases and scores: wandb, mlflow. Each reads its own variables."""

    def rules(self) -> list[Rule]:
        """The alerts, parsed. Raises ConfigError at one that cannot be understood."""
        return [parse_rule(text) for text in self.alert]

    def webhook_url(self) -> str | None:
        return self.alert_webhook or os.environ.get(WEBHOOK_VARIABLE) or None

    def validate(self) -> None:
        """Raises ConfigError where what is asked for does not go together, before anything has started."""
        rules = self.rules()
        action_flags = [f"--{name.replace('_', '-')}" for name in ("alert_command", "alert_webhook", "alert_exit")
                 if getattr(self, name)]  # fmt: skip
        if action_flags and not rules:
            raise ConfigError(
                f"{action_flags[0]} has no alert to act on.",
                fix=f"say when: --alert 'idle > 30% for 5min' {action_flags[0]} …",
            )
        webhook = self.webhook_url()
        if rules and webhook is not None and not webhook.startswith(("http://", "https://")):
            raise ConfigError("The address of the webhook is not one of the web.", choices=["https://…", "http://…"])
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise ConfigError(f"--metrics-port {self.metrics_port} is no port.", choices=["0 (a free one) … 65535"])
