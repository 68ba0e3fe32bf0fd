"""Shows runs as text (`explain.py`), as pages (`html.py`), and against each other (`compare.py`)."""
