"""What a training will need and cost, before it runs: `stoker plan`, and the full `stoker check`."""
