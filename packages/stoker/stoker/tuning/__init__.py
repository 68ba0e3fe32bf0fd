"""`stoker tune`: finds the settings with which a training runs faster on this machine, by measuring."""
