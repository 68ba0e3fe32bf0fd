"""Pictures in: finds and indexes annotations (`index`, `formats`), draws the demo's pictures (`demo`), decodes,
augments and loads batches. Annotations are columns in one memory-mapped file, never an object per sample; pictures
are read by threads. Not here: what a detector makes of a batch (`stoker.models`), and scoring
(`stoker.evaluation.evaluate`)."""
