"""Every setting that the user left open: derived from the data, the device and the recipe, each with its reason."""
