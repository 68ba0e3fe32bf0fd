"""The parts of the page that `stoker report` writes: text with escapes (`markup`), charts as data (`charts`), pictures
with their boxes (`pictures`), sections (`results`, `record`). `report/html.py` puts them
together; no torch, no network."""
