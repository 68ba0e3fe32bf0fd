"""Shows a run to people: on the terminal (`terminal.py`), in TensorBoard (`tensorboard.py`).

Readers of records and metrics, no more: nothing here trains or imports torch, so a run can be shown on any machine.
"""
