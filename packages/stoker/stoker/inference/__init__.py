"""A trained detector at work: load it (`model`), run it over images or tiles of large ones (`image_batches`,
`predict`), or run its exported file (`runtime`). `preview` shows images as training gets them.
"""
