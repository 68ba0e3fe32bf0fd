"""Shows runs, datasets and models as text, as HTML (`html.py`), and in TensorBoard (`tensorboard.py`).

Nothing here trains or imports torch, so a run can be shown on any machine.
"""
