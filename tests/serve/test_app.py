"""The server: what it answers to good and bad requests, and that it stays up."""

import asyncio
import json
import threading

import httpx
import numpy as np
import pyarrow as pa
import pytest

from rowhaul.serve import Scorer
from rowhaul.serve.app import make_app
from rowhaul.serve.bodies import ARROW
from rowhaul.serve.settings import ServeSettings

GOOD = {
    "shared": {"user": 7919},
    "candidates": [
        {"item": "item-1", "tags": [1, 2], "price": 0.5},
        {"item": "new", "tags": None, "price": 1},
    ],
}


@pytest.fixture(scope="module")
def scorer(served_run):
    return Scorer(served_run[1])


def client_of(scorer, **settings):
    app = make_app(scorer, ServeSettings(str(scorer.folder.path), **settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def ask(scorer, method, path, *, settings=None, **request):
    """One request in this process."""

    async def run():
        async with client_of(scorer, **(settings or {})) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def arrow_body(table, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def nulls(count):
    """Nulls that take no memory; those of `pa.nulls` do."""
    return pa.Array.from_buffers(pa.null(), count, [None])


def test_json_is_scored_as_by_the_scorer(scorer):
    answer = ask(scorer, "POST", "/score", json=GOOD)
    assert answer.status_code == 200
    assert answer.json()["step"] == scorer.step
    assert np.allclose(answer.json()["scores"], scorer.score(**GOOD), atol=1e-7)
    columns = {name: [one[name] for one in GOOD["candidates"]] for name in ("item", "tags", "price")}
    again = ask(scorer, "POST", "/score", json={"shared": GOOD["shared"], "candidates": columns})
    assert again.json() == answer.json()


def test_arrow_is_scored_and_answered(scorer):
    table = pa.Table.from_pylist(GOOD["candidates"]).replace_schema_metadata(
        {"shared": json.dumps(GOOD["shared"])}
    )
    headers = {"Content-Type": ARROW, "Accept": ARROW}
    answer = ask(scorer, "POST", "/score", content=arrow_body(table), headers=headers)
    assert answer.headers["content-type"] == ARROW
    found = pa.ipc.open_stream(answer.content).read_all()
    assert np.array_equal(found["score"].to_numpy(), scorer.score(**GOOD))
    assert found.schema.metadata[b"step"] == str(scorer.step).encode()


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"click", {}, 400, "the body is no JSON"),
        (b"[" * 100_000, {}, 400, "the body is no JSON"),
        (b"[1]", {}, 400, "must be a mapping"),
        (b"\x00\xff", {}, 400, "the body is no JSON"),
        (b"nonsense", {"Content-Type": ARROW}, 400, "the body is no Arrow stream"),
        (b"", {"Content-Type": ARROW}, 400, "the body is no Arrow stream"),
        (b"{}", {}, 422, "candidates: it is missing"),
        (b'{"candidates": [], "user": 3}', {}, 422, "only shared and candidates are known"),
        (b'{"candidates": [{}]}', {}, 422, "candidates[0].user: it is missing"),
    ],
)
def test_bad_bodies_are_named(scorer, body, headers, status, said):
    answer = ask(scorer, "POST", "/score", content=body, headers=headers)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_a_name_that_is_no_text_is_named(scorer):
    body = b'{"candidates": {"\\ud800": 1}}'
    answer = ask(scorer, "POST", "/score", content=body)
    assert (answer.status_code, answer.json()["field"]) == (422, "candidates.\ud800")


def test_arrow_columns_of_one_name_and_bad_shared_features_are_named(scorer):
    headers, table = {"Content-Type": ARROW}, pa.Table.from_pylist(GOOD["candidates"])
    for wrong in ("{", "[" * 100_000):
        unshared = table.replace_schema_metadata({"shared": wrong})
        answer = ask(scorer, "POST", "/score", content=arrow_body(unshared), headers=headers)
        assert (answer.status_code, answer.json()["field"]) == (422, "shared")
    for name, field in [("price", "candidates.price"), ("other", None)]:
        more = table.append_column("other", [[1, 2]]).append_column(name, [[7.0, 8.0]])
        more = more.replace_schema_metadata({"shared": json.dumps(GOOD["shared"])})
        answer = ask(scorer, "POST", "/score", content=arrow_body(more), headers=headers)
        assert (answer.status_code, answer.json().get("field")) == (422 if field else 200, field)


def test_a_wrong_field_is_named(scorer):
    wrong = {**GOOD, "candidates": [GOOD["candidates"][0], {**GOOD["candidates"][1], "price": "cheap"}]}
    answer = ask(scorer, "POST", "/score", json=wrong)
    assert answer.status_code == 422
    assert answer.json()["field"] == "candidates[1].price"


@pytest.mark.parametrize(
    ("values", "place", "said"),
    [
        ([True, 2.0], 0, "a number is needed, got true or false"),
        ([None, True, 2.0], 1, "a number is needed, got true or false"),
        (["cheap", 2.0], 0, "a number is needed, got a string"),
    ],
)
def test_the_value_that_is_no_number_is_named(values, place, said, scorer):
    first = GOOD["candidates"][0]
    columns = {name: [value] * len(values) for name, value in first.items()} | {"price": values}
    answer = ask(scorer, "POST", "/score", json={**GOOD, "candidates": columns})
    assert answer.json() == {
        "error": f"candidates.price[{place}]: {said}",
        "field": f"candidates.price[{place}]",
    }


def test_a_list_that_is_no_ids_is_shown_by_its_type_however_long_it_is(scorer):
    columns = {"user": [[True] * 1000], "item": ["a"], "tags": [None], "price": [1.0]}
    answer = ask(scorer, "POST", "/score", json={"candidates": columns})
    assert (answer.status_code, answer.json()["field"]) == (422, "candidates.user[0]")
    assert answer.json()["error"].partition("got ")[2].startswith("list<")


@pytest.mark.parametrize("name", ["user", "item", "tags", "price"])
@pytest.mark.parametrize("in_list", [False, True])
def test_mappings_do_not_become_columns(scorer, name, in_list):
    """A column for each name in any of them, with a value for all: 130 KB of 10,000 would take 800 MB."""
    values = [{f"k{number}": 1} for number in range(2_000)]
    columns = {"user": [1], "item": ["a"], "tags": [None], "price": [1.0]}
    columns = {one: 2_000 * some for one, some in columns.items()}
    columns[name] = [[one] for one in values] if in_list else values
    answer = ask(scorer, "POST", "/score", json={"candidates": columns})
    assert answer.json()["field"] == f"candidates.{name}[0]"
    needed, got = "a number" if name == "price" else "an id", "a list" if in_list else "a mapping"
    assert f"{needed} is needed, got {got}" in answer.json()["error"]


def test_other_paths_and_methods_are_refused_like_all_else(scorer):
    answer = ask(scorer, "GET", "/scores")
    assert (answer.status_code, list(answer.json())) == (404, ["error"])
    answer = ask(scorer, "GET", "/score")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json() == {"error": "/score does not take GET; /docs says what it takes"}
    answer = ask(scorer, "GET", "/stats?since=long", settings={"page": True})
    assert (answer.status_code, answer.json()["field"]) == (422, "since")


def test_requests_have_limits(scorer):
    million = b'{"candidates": {"item": [' + b"1," * 999_999 + b"1]}}"
    answer = ask(scorer, "POST", "/score", content=million)
    assert (answer.status_code, answer.json()["field"]) == (413, "candidates")
    assert "1,000,000 candidates, and 10,000 are allowed" in answer.json()["error"]
    settings = {"max_body_bytes": 1000}
    answer = ask(scorer, "POST", "/score", content=million, settings=settings)
    assert (answer.status_code, "more than 1,000 bytes" in answer.json()["error"]) == (413, True)

    async def pieces():
        for _ in range(100):
            yield b" " * 100

    answer = ask(scorer, "POST", "/score", content=pieces(), settings=settings)  # without a length
    assert answer.status_code == 413


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_body_that_arrow_would_unpack_is_refused(compression, scorer):
    table, headers = pa.table({"price": np.zeros(1 << 20)}), {"Content-Type": ARROW}
    body = arrow_body(table, compression=compression)
    answer = ask(scorer, "POST", "/score", content=body, headers=headers)
    assert (answer.status_code, "IpcWriteOptions(compression=None)" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    "tags",
    [
        nulls(1 << 25),
        pa.ListArray.from_arrays([0, 1 << 25], nulls(1 << 25)),
        pa.FixedSizeListArray.from_arrays(nulls(1 << 25), 1 << 24),
    ],
)
def test_nulls_that_take_no_bytes_are_counted_before_they_take_memory(tags, scorer):
    body, headers = arrow_body(pa.table({"tags": tags})), {"Content-Type": ARROW}
    answer = ask(scorer, "POST", "/score", content=body, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (413, "candidates")
    assert "and 16,777,216 are allowed" in answer.json()["error"]


def test_unknown_ids_are_an_error_where_that_is_asked_for(served_run):
    strict = Scorer(served_run[1], on_unknown="error")
    answer = ask(strict, "POST", "/score", json=GOOD)
    assert answer.status_code == 422
    assert "feature 'item'" in answer.json()["error"]


def test_a_slow_request_is_given_up_and_too_many_are_turned_away(scorer, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(scorer, "score_request", lambda shared, candidates: released.wait(20))

    async def run():
        async with client_of(scorer, max_waiting=2, timeout_seconds=0.3, threads=1) as client:
            waiting = [asyncio.create_task(client.post("/score", json=GOOD)) for _ in range(2)]
            await asyncio.sleep(0.1)
            turned_away = await client.post("/score", json=GOOD)
            healthy = await client.get("/healthz")  # the event loop is free
            return turned_away, healthy, [await one for one in waiting]

    try:
        turned_away, healthy, late = asyncio.run(run())
    finally:
        released.set()
    assert (turned_away.status_code, turned_away.headers["retry-after"]) == (503, "1")
    assert healthy.json()["status"] == "ok"
    assert [one.status_code for one in late] == [503, 503]
    assert "it was not scored within 0.3 seconds" in late[0].json()["error"]


async def stuck(piece=b'{"candidates"'):
    """A body that does not come to its end."""
    yield piece
    await asyncio.sleep(30)


def test_bodies_that_do_not_come_leave_room_for_others(scorer):
    async def run():
        async with client_of(scorer, max_waiting=1, timeout_seconds=5) as client:
            begun = [asyncio.create_task(client.post("/score", content=stuck())) for _ in range(5)]
            await asyncio.sleep(0.1)
            answer = await client.post("/score", json=GOOD)
            for one in begun:
                one.cancel()
            return answer

    assert asyncio.run(run()).status_code == 200


def test_bodies_that_are_arriving_take_a_limited_number_of_bytes(scorer):
    settings = {"max_waiting": 1, "max_body_bytes": 1000, "timeout_seconds": 1}

    async def run():
        async with client_of(scorer, **settings) as client:
            first = asyncio.create_task(client.post("/score", content=stuck(b" " * 900)))
            await asyncio.sleep(0.1)
            turned_away = await client.post("/score", content=stuck(b" " * 101))
            given_up = await first
            return turned_away, given_up, await client.post("/score", json=GOOD)

    turned_away, given_up, later = asyncio.run(run())
    assert (turned_away.status_code, turned_away.json()["error"]) == (
        503,
        "1,001 bytes are arriving; try again later",
    )
    assert (given_up.status_code, later.status_code) == (408, 200)


def test_a_body_that_does_not_come_is_given_up(scorer):
    answer = ask(scorer, "POST", "/score", content=stuck(), settings={"timeout_seconds": 0.2})
    assert (answer.status_code, "did not arrive" in answer.json()["error"]) == (408, True)


def test_what_is_counted(scorer):
    async def run():
        async with client_of(scorer) as client:
            for body in (GOOD, GOOD, {"candidates": [{}]}):
                await client.post("/score", json=body)
            return (await client.get("/metrics")).text

    lines = dict(line.rsplit(" ", 1) for line in asyncio.run(run()).splitlines() if not line.startswith("#"))
    assert lines['rowhaul_serve_requests_total{status="200"}'] == "2.0"
    assert lines['rowhaul_serve_requests_total{status="422"}'] == "1.0"
    assert lines["rowhaul_serve_candidates_total"] == "4.0"
    assert lines["rowhaul_serve_ids_total"] == "10.0"
    assert lines["rowhaul_serve_unknown_ids_total"] == "2.0"
    assert lines["rowhaul_serve_request_seconds_count"] == "3.0"
    assert lines["rowhaul_serve_requests_running"] == "0.0"
    assert lines["rowhaul_serve_model_step"] == f"{scorer.step}.0"


def test_the_page_needs_no_internet_and_openapi_has_an_example_that_works(scorer):
    page = ask(scorer, "GET", "/docs").text
    assert "http://" not in page
    assert "https://" not in page
    assert all(name in page for name in ("user", "item", "tags", "price"))
    described = ask(scorer, "GET", "/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]
    example = described["content"]["application/json"]["schema"]["example"]
    assert len(scorer.score(**example)) == 2
