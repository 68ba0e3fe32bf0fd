"""Augmentation: resize geometry and random numbers on the host (`geometry`), whole batches on the device (`device`)."""
