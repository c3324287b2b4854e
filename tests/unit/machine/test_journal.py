import os
from pathlib import Path

from machine.journal import shorten


def test_a_file_that_nobody_rotates_begins_anew(tmp_path: Path):
    file = tmp_path / "service.log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"x" * 100)
        assert not shorten(descriptor, 100)
        os.write(descriptor, b"x")
        assert shorten(descriptor, 100)
        os.write(descriptor, b"new")
        assert file.read_bytes() == b"new"
    finally:
        os.close(descriptor)


def test_what_is_no_file_is_left_alone():
    read, write = os.pipe()
    try:
        assert not shorten(write, 0)
    finally:
        os.close(read)
        os.close(write)
