"""A real server process: it finishes running requests when told to stop, and several share a port."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import BODY, children_of, start, stop, wait_for, wait_until_up

from rowhaul.serve.server import bind
from rowhaul.serve.settings import ServeSettings

NO_DELAY = socket.IPPROTO_TCP, socket.TCP_NODELAY


def leave_early(url):
    """A client that closes its connection in the middle of a body."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        wait_until_running(url, 1)
    wait_until_running(url, 0)


def wait_until_running(url, count):
    """Wait until the server has begun as many requests, and not ended them."""

    def is_so():
        return f"\nrowhaul_serve_requests_running {count}.0\n" in httpx.get(f"{url}/metrics", timeout=30).text

    wait_for(is_so, f"{count} requests are running")


def is_closed(url):
    try:
        httpx.get(f"{url}/healthz", timeout=5)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:
        return False
    return False


def test_answers_do_not_wait_for_acknowledgements(served_run):
    async def first_connection(bound):
        accepted = asyncio.get_running_loop().create_future()

        class Listener(asyncio.Protocol):
            def connection_made(self, transport):
                accepted.set_result(transport.get_extra_info("socket").getsockopt(*NO_DELAY))

        server = await asyncio.get_running_loop().create_server(Listener, sock=bound)
        client = socket.create_connection(bound.getsockname())
        try:
            return await accepted
        finally:
            client.close()
            server.close()

    assert asyncio.run(first_connection(bind(ServeSettings(folder=str(served_run[1]), port=0))))


@pytest.mark.slow
def test_a_server_finishes_running_requests_when_it_is_stopped(served_run):
    process, url = start(served_run[1], "--timeout", "100")
    try:
        assert wait_until_up(url)["status"] == "ok"
        assert len(httpx.post(f"{url}/score", json=BODY, timeout=30).json()["scores"]) == 2
        leave_early(url)
        stopping, answers = threading.Event(), []

        def slow_body():
            yield b'{"shared": {"user": 1, "item": "x", "tags": [], "price": 1},'
            stopping.wait(90)
            yield b'"candidates": [{}]}'

        def ask():
            answers.append(httpx.post(f"{url}/score", content=slow_body(), timeout=100))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until_running(url, 1)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: is_closed(url), "the port is closed")
        stopping.set()
        output, _ = process.communicate(timeout=200)
        thread.join(30)
        assert answers[0].status_code == 200
        assert process.returncode == 0, output
        assert "Traceback" not in output
        assert "running requests were finished" in output
    finally:
        process.kill()


@pytest.mark.slow
def test_processes_share_a_port_and_count_together(served_run):
    process, url = start(served_run[1], "--workers", "2")
    try:
        wait_until_up(url)
        for _ in range(40):
            with httpx.Client() as client:  # a new connection: any process may get it
                assert client.post(f"{url}/score", json=BODY, timeout=30).status_code == 200
        text = httpx.get(f"{url}/metrics", timeout=30).text
        assert 'rowhaul_serve_requests_total{status="200"} 40.0' in text
        assert "rowhaul_serve_candidates_total 80.0" in text
        code, _ = stop(process)
        assert code == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_connections_go_to_the_process_that_has_the_fewest(served_run):
    process, url = start(served_run[1], "--workers", "2")
    host, _, port = url.removeprefix("http://").rpartition(":")

    def ports():
        """The clients' ports of each process, fewest first."""

        def ports_of(pid):
            found = psutil.Process(pid).net_connections("tcp")
            return {one.raddr.port for one in found if one.raddr}

        return sorted(map(ports_of, children_of(process.pid)), key=len)

    def counted(expected):
        """Processes say that a connection is closed before they close it, so that the first one knows."""
        wait_for(lambda: list(map(len, ports())) == expected, lambda: f"{expected}; there are {ports()}")

    def both_have_one():
        clients.append(opened.enter_context(socket.create_connection((host, int(port)))))
        time.sleep(0.1)
        return all(ports())

    def all_are_taken():
        """None is still on its way, to be closed by its process when nobody looks."""
        return {one.getsockname()[1] for one in clients} <= set().union(*ports())

    clients = []
    with ExitStack() as opened:
        opened.callback(process.kill)
        wait_until_up(url)
        wait_for(both_have_one, lambda: f"connections of both; there are {ports()}")
        wait_for(all_are_taken, lambda: f"all {len(clients)} connections; there are {ports()}")
        for client in clients:
            client.close()
        counted([0, 0])
        clients = [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(9)]
        counted([4, 5])
        for client in clients:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(20).startswith(b"HTTP/1.1 200")
        few, _ = ports()
        for client in [one for one in clients if one.getsockname()[1] in few][:3]:
            client.close()
        counted([1, 5])
        for _ in range(4):
            opened.enter_context(socket.create_connection((host, int(port))))
        counted([5, 5])
        assert stop(process)[0] == 0


@pytest.mark.slow
def test_a_killed_process_is_replaced_while_others_answer(served_run):
    process, url = start(served_run[1], "--workers", "2")
    try:
        wait_until_up(url)

        def num_serving():
            text = httpx.get(f"{url}/metrics", timeout=30).text
            return int(float(re.search(r"^rowhaul_serve_processes (\S+)", text, re.MULTILINE)[1]))

        wait_for(lambda: num_serving() == 2, "two processes serve")
        before = children_of(process.pid)
        assert len(before) == 2
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: killed not in children_of(process.pid), "the killed process is noticed")
        for _ in range(40):
            with httpx.Client() as client:  # a new connection each
                assert client.post(f"{url}/score", json=BODY, timeout=30).status_code == 200
        wait_for(lambda: len(children_of(process.pid)) == 2 and num_serving() == 2, "it is replaced")
        assert killed not in children_of(process.pid)
        assert 'requests_total{status="200"} 40.0' in httpx.get(f"{url}/metrics", timeout=30).text
        left = children_of(process.pid)
        process.kill()  # nothing of it may keep the port
        process.communicate(timeout=200)
        wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in left), "processes end")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", timeout=5)
    finally:
        process.kill()


def test_bad_starts_are_one_line(served_run, tmp_path):
    def said(*arguments):
        command = [sys.executable, "-m", "rowhaul", "serve", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return " ".join(done.stderr.split())

    assert "is no folder to serve from" in said(tmp_path)
    assert "port must be from 1 to 65535" in said(served_run[1], "--port", "70000")
