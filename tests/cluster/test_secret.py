"""Where the secret of a run comes from, and what is refused."""

import os

import pytest

from rowhaul.cluster.secret import SecretError, load_secret

SECRET = "0123456789abcdef-secret"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"  {SECRET}\n")
    path.chmod(0o600)
    return path


def test_the_file_comes_before_the_environment(file):
    environment = {"ROWHAUL_SECRET": f"{SECRET}-of-the-environment"}
    assert load_secret(str(file), environment) == SECRET.encode()
    assert load_secret(None, environment) == f"{SECRET}-of-the-environment".encode()
    assert load_secret(None, {}) is None


def test_the_home_folder_is_known_where_no_shell_was(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert load_secret(f"~/{file.name}", {}) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_a_file_open_to_all_is_refused_with_the_command_that_closes_it(file, mode):
    file.chmod(mode)
    with pytest.raises(SecretError, match=rf"open to all users \(mode {mode:04o}\): run `chmod 600 {file}`"):
        load_secret(str(file))


def test_a_file_for_the_group_is_taken(file):
    file.chmod(0o440)
    assert load_secret(str(file)) == SECRET.encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty; it needs at least 16"),
        (" \n", "is empty"),
        ("short", "has 5 bytes; it needs at least 16"),
    ],
)
def test_empty_and_short_secrets_are_refused_everywhere(file, text, says):
    file.write_text(text)
    with pytest.raises(SecretError, match=says):
        load_secret(str(file))
    with pytest.raises(SecretError, match=says):
        load_secret(None, {"ROWHAUL_SECRET": text})


def test_a_large_file_is_refused(file):
    file.write_bytes(b"x" * 5000)
    with pytest.raises(SecretError, match="more than 4096 bytes: is this the right file"):
        load_secret(str(file))


def test_what_cannot_be_read_is_named(tmp_path, file):
    with pytest.raises(SecretError, match="cannot be read: No such file"):
        load_secret(str(tmp_path / "missing"))
    with pytest.raises(SecretError, match=f"{tmp_path} cannot be read: Is a directory"):
        load_secret(str(tmp_path))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SecretError, match="fifo is not a regular file"):
        load_secret(str(tmp_path / "fifo"))
    if os.getuid():  # root reads everything
        file.chmod(0)
        with pytest.raises(SecretError, match="cannot be read: Permission denied"):
            load_secret(str(file))
