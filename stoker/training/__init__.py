"""Training: what is derived (`derive`, `fit`), what a step does (`optim`), the one loop (`loop`), and what is kept
(`checkpoint`). Neighbours: `data` delivers batches, `models` the losses, `measure` the clocks, `report` the screen."""
