"""Where `rowhaul simulate` may write: whatever is wrong is found before the run, and nothing is lost."""

import errno
import json
import os
import shutil

import pytest


@pytest.fixture
def refused(simulate, monkeypatch):
    """Run the command, which must fail before the simulation; returns its message."""

    def run(*arguments, data=None):
        with monkeypatch.context() as patch:
            patch.setattr("rowhaul.cli.simulate.run.run_simulation", lambda given: pytest.fail("it ran"))
            code, _, err = simulate("--dispatch", "laia", *arguments, data=data)
        assert code == 2
        assert "Traceback" not in err
        return err

    return run


def test_files_that_exist_are_kept(simulate, refused, tmp_path):
    out = tmp_path / "x.json"
    out.write_text("precious")
    assert "--overwrite" in refused("--json", out)
    assert out.read_text() == "precious"
    assert simulate("--dispatch", "laia", "--no-subsets", "--json", out, "--overwrite")[0] == 0
    json.loads(out.read_text())
    assert list(tmp_path.iterdir()) == [out]


def test_inputs_are_never_replaced(refused, log_folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(log_folder / "part-0.parquet", data / "x.parquet")
    shutil.copy(log_folder / "schema.yaml", data / "schema.yaml")
    (tmp_path / "other").symlink_to(data)
    (tmp_path / "link.parquet").symlink_to(data / "x.parquet")
    os.link(data / "x.parquet", tmp_path / "hard.parquet")
    before = (data / "x.parquet").read_bytes(), (data / "schema.yaml").read_bytes()
    for path in (
        data / "x.parquet",
        data / ".." / "data" / "x.parquet",
        tmp_path / "other" / "x.parquet",
        tmp_path / "link.parquet",
        tmp_path / "hard.parquet",
        data / "schema.yaml",
    ):
        for option in ("--json", "--report"):
            said = refused(option, path, "--overwrite", data=data / "x.parquet")
            assert "one of the input files" in said
    given = ("--schema", data / "schema.yaml", "--json", data / "schema.yaml", "--overwrite")
    assert "one of the input files" in refused(*given)
    assert before == ((data / "x.parquet").read_bytes(), (data / "schema.yaml").read_bytes())


def test_two_results_need_two_files(refused, tmp_path):
    (tmp_path / "f").mkdir()
    for other in (tmp_path / "x", tmp_path / "f" / ".." / "x"):
        assert "same file" in refused("--json", tmp_path / "x", "--report", other)


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
def test_only_regular_files_are_replaced(overwrite, refused, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("folder", "is a folder"),
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("pipe", "not a regular file"),
        ("/dev/null", "not a regular file"),
    ):
        assert said in refused("--json", tmp_path / name, *overwrite)
    assert (tmp_path / "file").read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_folders_that_are_none_are_named(refused, tmp_path):
    (tmp_path / "f").write_text("")
    for path in (tmp_path / "f" / "x.json", tmp_path / "f" / "g" / "x.json"):
        assert f"{tmp_path / 'f'} is not a folder" in refused("--json", path)
    assert f"the folder {tmp_path / 'g'} does not exist" in refused("--json", tmp_path / "g" / "x.json")


@pytest.mark.parametrize("length", [253, 300])
def test_names_that_are_too_long_are_said_so(length, refused, tmp_path):
    assert "the name is too long" in refused("--json", tmp_path / ("x" * length))
    assert "the name is too long" in refused("--json", tmp_path / ("x" * 300) / "x.json")


def test_folders_that_cannot_be_written_are_found_before_the_run(refused, tmp_path, monkeypatch):
    open_file = os.open

    def read_only(path, flags, *rest, **named):
        if str(path).startswith(str(tmp_path)) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return open_file(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    said = refused("--json", tmp_path / "x.json")
    assert f"no file can be made in the folder {tmp_path} (read-only file system)" in said
    assert not list(tmp_path.iterdir())


def test_what_looks_like_a_temporary_file_is_not_lost(refused, tmp_path):
    (tmp_path / ".tmp-x.json").write_text("precious")
    assert "in the way" in refused("--json", tmp_path / "x.json")
    assert (tmp_path / ".tmp-x.json").read_text() == "precious"
