"""Folders that appear under their name only when they are complete."""

import os
from pathlib import Path

import pytest

from rowhaul._files import check_new_folder, whole
from rowhaul.errors import ConfigError


def written(path):
    with whole(path) as folder:
        folder.mkdir()
        (folder / "file").touch()
    return (path / "file").exists()


def test_what_is_not_refused_can_be_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "new"):
        check_new_folder(path, "the test")
        assert written(path)
        with pytest.raises(ConfigError, match="not empty"):
            check_new_folder(path, "the test")


@pytest.mark.parametrize("leads_to", ["empty", "nowhere"])
def test_a_link_is_refused_before_anything_is_written(tmp_path, leads_to):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / leads_to)
    with pytest.raises(ConfigError, match=r"link is a link, .* name the place that it leads to"):
        check_new_folder(tmp_path / "link", "the test")


def test_the_working_directory_is_refused_under_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", tmp_path):
        with pytest.raises(ConfigError, match=r"is the working directory, .* a new folder in it"):
            check_new_folder(Path(name), "the test")


def test_all_of_a_folder_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else it could be there after a power failure with files that are empty."""
    synced, sync, path = set(), os.fsync, tmp_path / "made"

    def noted(descriptor):
        sync(descriptor)
        if not path.exists():
            synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    with whole(path) as folder:
        (folder / "tables" / "deep").mkdir(parents=True)
        for name in ("manifest.json", "tables/user.parquet", "tables/deep/one"):
            (folder / name).write_text(name)
    assert {one.stat().st_ino for one in (path, *path.rglob("*"))} <= synced
