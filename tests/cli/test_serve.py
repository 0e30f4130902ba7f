"""`rowhaul export --dense` and `rowhaul serve`, as a user calls them."""

import importlib.util


def test_an_export_to_serve_from_says_how_close_it_is(rowhaul, trained, tmp_path):
    code, out, err = rowhaul("export", trained, "--out", tmp_path / "served", "--dense", "pt2")
    assert code == 0, err
    said = " ".join(out.split())
    assert "unseen ids among them, compared with predict: the largest difference is" in said
    assert f"rowhaul serve {tmp_path / 'served'}" in said
    assert "rows.bin" in said
    assert "compared with the trained model's" in (tmp_path / "served" / "README.md").read_text()


def test_the_old_name_of_the_folder_still_works(rowhaul, trained, tmp_path):
    code, _, err = rowhaul("export", trained, "--to", tmp_path / "old")
    assert code == 0
    assert "--to is now called --out" in err
    assert (tmp_path / "old" / "export.json").is_file()
    code, _, err = rowhaul("export", trained)
    assert (code, "export needs --out" in err) == (2, True)
    assert "--to" not in rowhaul("export", "--help")[1]
    code, _, err = rowhaul("ckpt", "merge", trained, "--to", tmp_path / "merged")
    assert (code, "--to is now called --out" in err) == (0, True)
    code, _, err = rowhaul("ckpt", "merge", trained)
    assert (code, "ckpt merge needs --out" in err) == (2, True)


def test_options_of_tables_do_not_go_with_a_graph(rowhaul, trained, tmp_path):
    code, _, err = rowhaul("export", trained, "--out", tmp_path / "x", "--dense", "onnx", "--state")
    assert (code, "export twice" in " ".join(err.split())) == (2, True)
    assert list(tmp_path.iterdir()) == []
    code, _, err = rowhaul("export", trained, "--out", "redis://127.0.0.1:1/0", "--dense", "onnx")
    assert (code, "rows in Redis are whole vectors" in err) == (2, True)


def test_a_missing_extra_is_one_line(rowhaul, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name, *rest)
    )
    code, _, err = rowhaul("serve", tmp_path)
    assert code == 2
    assert " ".join(err.split()) == "error: serving needs uvicorn: pip install 'rowhaul[serve]'"


def test_serving_refuses_what_is_no_served_folder(rowhaul, trained):
    code, _, err = rowhaul("serve", trained)
    assert (code, "is no folder to serve from: it has no served.json" in " ".join(err.split())) == (2, True)
    code, _, err = rowhaul("serve", trained, "--workers", "0")
    assert (code, "workers must be at least 1" in err) == (2, True)
