"""What a command found: `finding.py` is the one type; `stoker/report/findings_terminal.py` prints it."""
