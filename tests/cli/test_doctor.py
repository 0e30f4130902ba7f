"""What the doctor finds on machines that are well and on machines that are not."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from rowhaul.cli.doctor.command import checks, doctor, render
from rowhaul.cli.doctor.machine import (
    Check,
    check_folder,
    check_gpu,
    check_packages,
    check_python,
    check_shared_memory,
)
from rowhaul.cli.doctor.network import Network, check_gloo, check_hostname, check_interfaces

NETWORK = Network(
    interfaces={"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.5",), "eth1": ("192.168.1.5",)},
    routed="eth1",
    hostname="worker-3",
    host_addresses=("192.168.1.5",),
    chosen=None,
)


def rendered(found: list[Check]) -> str:
    text = io.StringIO()
    render(found, Console(file=text, width=200))
    return text.getvalue()


def test_this_machine_passes_and_every_complaint_has_a_fix() -> None:
    found = checks()
    assert [check for check in found if check.status == "fail"] == []
    assert all(check.fix for check in found if check.status != "ok")
    assert len({check.name for check in found}) == len(found)
    assert "Ready to train" in rendered(found)


def test_a_card_needs_triton_and_triton_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H200")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in check_gpu().detail
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C compiler" in check_gpu().detail
    assert "install gcc" in check_gpu().fix


def test_the_command_prints_json_and_exits_with_zero() -> None:
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0
    assert {"name", "status", "detail", "fix"} == set(json.loads(result.stdout)[0])


def test_a_failed_check_makes_the_exit_status_nonzero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "fix:" in result.stdout


def test_render_shows_the_fix_and_does_not_read_markup_in_it() -> None:
    text = rendered([Check("x", "ok", "fine"), Check("y", "fail", "broken", "run `pip install a[b]`")])
    assert "fix: run `pip install a[b]`" in text
    assert "1 of 2 checks failed" in text


def test_packages_that_are_missing_or_old_are_named() -> None:
    found = check_packages(["numpy>=1.26", "numpy>=999.1", "no-such-package>=1.0"])
    assert found.status == "fail"
    assert "999.1 is needed" in found.detail
    assert "no-such-package is missing" in found.detail
    assert "pip install" in found.fix


def test_versions_compare_as_numbers() -> None:
    assert check_packages(["numpy>=1.9.100", "torch>=2"]).status == "ok"
    assert check_packages(["numpy>=1.9,!=1.9.*"]).status == "ok"
    major = np.__version__.partition(".")[0]
    assert f"!={major}.* is needed" in check_packages([f"numpy>=1.9,!={major}.*"]).detail
    assert check_python(">=3.9").status == "ok"
    assert check_python(">=3.999").status == "fail"


def test_a_folder_that_cannot_be_written_to_fails(tmp_path: Path) -> None:
    assert check_folder(tmp_path).status in ("ok", "warn")
    found = check_folder(tmp_path / "missing")
    assert found.status == "fail"
    assert str(tmp_path / "missing") in found.detail


def test_a_system_without_dev_shm_is_fine(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "missing").status == "ok"


def test_a_host_name_that_other_machines_can_reach_is_fine() -> None:
    assert check_hostname(NETWORK).status == "ok"


@pytest.mark.parametrize("addresses", [("127.0.1.1",), ("127.0.0.1", "::1"), ()])
def test_a_host_name_that_means_this_machine_alone_is_warned_of(addresses: tuple[str, ...]) -> None:
    found = check_hostname(replace(NETWORK, host_addresses=addresses))
    assert found.status == "warn"
    assert "export GLOO_SOCKET_IFNAME=eth1" in found.fix
    assert check_hostname(replace(NETWORK, host_addresses=addresses, chosen="eth0")).status == "ok"


def test_a_machine_without_a_network_is_fine_on_its_own() -> None:
    alone = replace(NETWORK, interfaces={"lo": ("127.0.0.1",)}, routed=None, host_addresses=("127.0.0.1",))
    assert check_hostname(alone).status == "ok"
    assert check_interfaces(alone).status == "ok"


def test_the_interface_that_is_used_is_named_and_must_exist() -> None:
    assert "eth1 leads to other machines" in check_interfaces(NETWORK).detail
    assert check_interfaces(replace(NETWORK, chosen="eth0")).status == "ok"
    found = check_interfaces(replace(NETWORK, chosen="eth0,eth7"))
    assert found.status == "fail"
    assert "'eth7'" in found.detail
    assert "export GLOO_SOCKET_IFNAME=eth1" in found.fix


def test_a_process_group_that_cannot_form_fails_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_gloo().status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found = check_gloo()
    assert found.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in found.fix
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert check_gloo().status == "ok"


@pytest.mark.slow
def test_a_kernel_cache_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = "from rowhaul.cli.doctor.machine import check_kernel_cache as c; print(c().status, c().detail)"
    for folder, expected in [(tmp_path / "file" / "cache", "warn"), (tmp_path / "cache", "ok")]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        assert run.stdout.startswith(expected)
        assert str(folder) in run.stdout
