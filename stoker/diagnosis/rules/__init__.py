"""Looks for the causes of `catalogue.py` in a run's records: pure functions, records in, findings out.

A rule abstains (None) when what it looks for is not there, or when a record that it needs is missing: missing is not
zero. A file for each group of causes; `finding.py` says how a rule says something, `engine.py` asks them all.
`reader.py` beside this folder sums the records up. What ended a run that neither lives nor finished:
`postmortem.py`.
"""

from stoker.diagnosis.reader import read_run
from stoker.diagnosis.rules.engine import RULES, diagnose, run_rules, write_findings
from stoker.diagnosis.run_data import RunRecords

__all__ = ["RULES", "RunRecords", "diagnose", "read_run", "run_rules", "write_findings"]
