"""The commands of deploy/live-compose.yaml, run on this machine against a real Redis; containers are not."""

import json
import re
import shlex
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

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "live-compose.yaml").read_text())
SERVICES = COMPOSE["services"]
IMAGE = (DEPLOY / "Dockerfile").read_text()


def words_of(service):
    """What a container of the image runs: an entrypoint, the service's or the image's, and the command."""
    image = json.loads(re.search(r"^ENTRYPOINT (.*)$", IMAGE, re.MULTILINE)[1])
    command = SERVICES[service]["command"]
    words = shlex.split(command) if isinstance(command, str) else command
    return [one.replace("$$", "$") for one in [*SERVICES[service].get("entrypoint", image), *words]]


def command_of(service, places, more=""):
    """A service's command with this machine's places for the container's, and more options."""
    words = words_of(service)
    text = words[2] if words[:2] == ["sh", "-c"] else f"exec {shlex.join(words)}"
    for place, here in places.items():
        assert place in text
        text = text.replace(place, str(here))
    return ["sh", "-c", f"{text.replace('exec rowhaul', f'exec {sys.executable} -m rowhaul')} {more}"]


def wait_for(condition, what, *processes):
    end = time.monotonic() + 250
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


@pytest.mark.parametrize(("service", "command"), [("trainer", "train"), ("server", "serve")])
def test_the_image_runs_the_commands(service, command):
    words = words_of(service)
    if words[:2] == ["sh", "-c"]:
        assert len(words) == 3  # the shell takes the rest for its own arguments
        words = words[2].split("exec ")[1].split()
    assert words[:2] == ["rowhaul", command]


def test_the_image_has_what_the_commands_need():
    extras = re.search(r"\[([\w,]+)\]\"", IMAGE)[1].split(",")
    assert {"redis", "serve", "onnx"} <= set(extras)  # the stream, the server, the graph that is published
    # A volume begins with the owner of the image's folder in its place; others are root's.
    assert re.search(r"install --directory --owner rowhaul .*/state\b", IMAGE)
    assert "state:/state" in SERVICES["trainer"]["volumes"]


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
        sent = time.time()
        send(2)
        trainer = start(command_of("trainer", places, more))
        wait_for(lambda: answer(f"{url}/healthz").json()["step"] == 10, "a trainer goes on", trainer, server)
        stats = answer(f"{url}/stats").json()
        assert stats["newest_event"] > sent - 1  # Redis counts milliseconds
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
