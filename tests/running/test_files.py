"""Files that are whole or absent."""

import pytest

from otb.files import sha256_of, whole


def test_a_file_takes_its_name_when_it_is_whole(tmp_path):
    file = tmp_path / "file"
    with whole(file) as aside:
        aside.write_text("new")
        assert not file.exists() and aside.parent == file.parent
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_an_error_while_writing_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole(file) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_file_that_the_block_does_not_write_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), whole(tmp_path / "file"):
        pass


def test_hash_is_that_of_the_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256_of(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
