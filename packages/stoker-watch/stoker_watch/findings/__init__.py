"""What a command found: `finding.py` is the one type; `stoker_watch/report/findings_terminal.py` prints it."""
