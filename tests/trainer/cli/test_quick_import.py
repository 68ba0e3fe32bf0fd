"""Imports of a start, while a thread loads the libraries of torch."""

import subprocess
import sys

PROGRAM = """
import os
put = os.putenv
def spy(name, value):
    assert os.fsdecode(name) in known, name
    put(name, value)
from stoker.cli import quick_import
known = set(os.environ) | set(quick_import.SET_BY_OTHERS)
os.putenv = spy
with quick_import.quick_imports():
    assert {"LD_LIBRARY_PATH", "OPENBLAS_MAIN_FREE"} <= set(os.environ)
"""


def test_no_variable_is_added_while_libraries_read_the_environment() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
