"""Writers replace a link that someone put in place of their file, and never write through it."""

import os
import platform
from pathlib import Path

import pytest
from PIL import Image

from stoker.evaluation.draw import save_image
from stoker_watch.runs.records import EVENTS, RunFolder
from stoker_watch.storage.local_files import write_atomic


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def test_a_link_in_place_of_the_file_or_its_temporary(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "out.jpg"
    temporary = tmp_path / f".out.jpg.{platform.node()}.{os.getpid()}.tmp"
    for write in (
        lambda: write_atomic(out, b"new"),
        lambda: write_atomic(out, b"new", durable=False),
        lambda: save_image(Image.new("RGB", (4, 4)), out),
    ):
        for link in (out, temporary):
            link.unlink(missing_ok=True)
            link.symlink_to(victim)
        write()
        assert victim.read_text() == "mine"
        assert not out.is_symlink()
        assert out.stat().st_size > 0
        assert not temporary.exists()


def test_a_link_in_place_of_a_file_of_the_run(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / EVENTS).symlink_to(victim)
    folder = RunFolder(tmp_path / "run", 1)
    with pytest.raises(OSError, match="it is a link"):
        folder.event("info", "a line")
    assert victim.read_text() == "mine"
