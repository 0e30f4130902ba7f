"""The commands of deploy/live-compose.yaml, run on this machine against a real Redis; containers are not."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from click_logs import click_log
from redis_server import RedisServer

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "live-compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def command_of(service, places, more=""):
    """A service's command with this machine's places for the container's, and more options."""
    command = SERVICES[service]["command"]
    text = command if isinstance(command, str) else command[-1].replace("$$", "$")
    for place, here in places.items():
        assert place in text
        text = text.replace(place, str(here))
    words = text.split()
    words[words.index("rowhaul")] = f"{sys.executable} -m rowhaul"
    begin = "" if "exec" in words else "exec "  # the process that is started is the one to stop
    return ["sh", "-c", f"{begin}{' '.join(words)} {more}"]


def wait_for(condition, what, *processes):
    end = time.monotonic() + 90
    while not (found := condition()):
        for one in processes:
            assert one.poll() is None, (what, one.communicate()[0])
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


def answer(url):
    try:
        return httpx.get(url, timeout=5)
    except httpx.HTTPError:
        return None


def test_services_share_what_they_need():
    assert set(SERVICES) == {"redis", "trainer", "server"}
    assert "--appendfsync always" in SERVICES["redis"]["command"]
    named = {one.partition(":")[0] for service in SERVICES.values() for one in service["volumes"]}
    assert set(COMPOSE["volumes"]) == {one for one in named if not one.startswith(".")}
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))  # not for strangers


@pytest.mark.slow
def test_the_commands_learn_and_serve(tmp_path, log_schema):
    (tmp_path / "redis").mkdir()
    redis, running = RedisServer(tmp_path / "redis"), []
    redis.start()
    try:
        log_schema.write(tmp_path / "schema.yaml")
        places = dict.fromkeys(("/config/", "/state/"), f"{tmp_path}/")
        places["redis:6379"] = f"127.0.0.1:{redis.port}"
        more = "--batch-size 100 --embedding-dim 4"

        def start(command):
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            return running[-1]

        def send(seed):
            lines = "\n".join(json.dumps(row) for row in click_log(500, seed).to_pylist())
            redis.client.xadd("clicks", {"json": lines})

        trainer = start(command_of("trainer", places, more))
        wait_for((tmp_path / "served" / "served.json").is_file, "something is published", trainer)
        port = {"--port 8080": "--port 0", "--host 0.0.0.0": "--host 127.0.0.1"}
        server = start(command_of("server", {"/state/": f"{tmp_path}/", **port}))
        url = server.stdout.readline().split("/docs")[0].split()[-1]
        wait_for(lambda: answer(f"{url}/healthz"), "the server answers", server, trainer)
        send(1)
        wait_for(lambda: answer(f"{url}/healthz").json()["step"] == 5, "the server knows 5 batches", trainer)
        trainer.kill()
        trainer.communicate()
        send(2)
        trainer = start(command_of("trainer", places, more))
        wait_for(lambda: answer(f"{url}/healthz").json()["step"] == 10, "a trainer goes on", trainer, server)
        stats = answer(f"{url}/stats").json()
        assert stats["newest_event"] > time.time() - 120
        assert answer(f"{url}/page").status_code == 200
    finally:
        for one in running:
            one.send_signal(signal.SIGTERM)
        for one in running:
            try:
                one.communicate(timeout=200)
            except subprocess.TimeoutExpired:
                one.kill()
        redis.kill()
