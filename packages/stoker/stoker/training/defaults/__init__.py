"""Values of all settings that the user did not set: derived from the data, the device and the recipe, with reasons."""
