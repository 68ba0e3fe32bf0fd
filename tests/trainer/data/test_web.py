"""Data sets are not read from a web server, which cannot list: the error says what to do."""

import pytest

from stoker.data.index import open_index
from stoker_watch.errors import DataError


@pytest.mark.parametrize("address", ["https://host/set", "http://host/set/annotations.json"])
def test_a_data_set_on_a_web_server_is_refused(address: str) -> None:
    with pytest.raises(DataError, match="not read from a web server") as raised:
        open_index(address)
    assert raised.value.fix is not None
    assert "download the images" in raised.value.fix
