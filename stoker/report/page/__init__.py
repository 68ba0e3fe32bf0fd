"""Parts of the page of `stoker report`: HTML elements (`markup.py`), charts as data (`charts.py`), images with boxes
(`images.py`), and the sections. `report/html.py` puts them together. No torch, no network."""
