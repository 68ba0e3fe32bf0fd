"""The pages of `stoker report` as templates, and what they show besides text: charts as data (`charts.py`,
`dataset.py`), images with boxes (`images.py`). `report/html.py` fills the templates. No torch, no network."""
