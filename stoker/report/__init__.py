"""Shows runs, datasets and models as text (`*_terminal.py`), as HTML (`html.py`), in TensorBoard (`tensorboard.py`).

Nothing here trains or imports torch, so a run can be shown on any machine.
"""
