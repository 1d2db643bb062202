"""Reward services, asked over real HTTP on the loopback."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import ServiceReward
from rloo_pipeline.rewards import service
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.rewards.service import open_service, seconds_to_wait
from tests.conftest import CommandLine
from tests.project import REPOSITORY, Project

TOKEN = 'q9/Zx"7-secret'
Answer = tuple[int, dict[str, str], bytes]
Body = dict[str, Any]


def well(rewards: list[Any], **more: Any) -> Answer:
    return 200, {}, json.dumps({"rewards": rewards, **more}).encode()


class Server:
    """A service on the loopback whose answers a function gives; it keeps what it was asked."""

    def __init__(self, answer: Callable[[Body], Answer]) -> None:
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                outer.connections.add(self.client_address)
                status, headers, content = answer(body)
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 200

        self.http = Http(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(service, "BACKOFF", 0.01)
    monkeypatch.setenv("SERVICE_TOKEN", TOKEN)
    started = []

    def start(answer: Callable[[Body], Answer]) -> Server:
        server = Server(answer)
        threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def rows(n: int, **columns: list[Any]) -> pa.Table:
    return pa.table(
        {
            "prompt_id": [f"p{i}" for i in range(n)],
            "sample_index": pa.array([0] * n, pa.int32()),
            "prompt_text": [f"<user>question {i}" for i in range(n)],
            "completion_text": [f"answer {i}" for i in range(n)],
            "completion_token_ids": [[i] for i in range(n)],
            "prompt": [[{"role": "user", "content": f"question {i}"}] for i in range(n)],
            **columns,
        }
    )


def score(url: str, table: pa.Table, *, limit: float = 30.0, token: bool = False, **execution: Any) -> Scored:
    config = ServiceReward(name="quality", url=url, time_limit=limit, token_env="SERVICE_TOKEN" if token else None)
    with open_service(config, ExecutionConfig(**execution)) as scorer:
        return scorer(table)


def indices(body: Body) -> list[int]:
    return [int(text.removeprefix("answer ")) for text in body["completions"]]


def test_what_is_asked(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: well([0.5, None]))
    day = datetime(2024, 2, 3, tzinfo=UTC)
    table = rows(
        2, label=["x", None], level=[1, 2], image=[b"\x00\xff", None], share=[float("nan"), 0.25], day=[day] * 2
    )
    scored = score(server.url, table)
    assert scored.scores_N.tolist()[0] == 0.5
    assert np.isnan(scored.scores_N[1])
    assert scored.errors == {}
    assert server.bodies == [
        {
            "protocol": 1,
            "query": ["<user>question 0answer 0", "<user>question 1answer 1"],
            "prompts": ["<user>question 0", "<user>question 1"],
            "labels": ["x", None],
            "completions": ["answer 0", "answer 1"],
            "columns": {
                "prompt": [[{"role": "user", "content": "question 0"}], [{"role": "user", "content": "question 1"}]],
                "prompt_id": ["p0", "p1"],
                "label": ["x", None],
                "level": [1, 2],
                "image": ["AP8=", None],
                "share": [None, 0.25],
                "day": ["2024-02-03T00:00:00+00:00"] * 2,
            },
        }
    ]
    assert "Authorization" not in server.headers[0]


def test_order_is_kept_and_requests_overlap_on_kept_connections(serve: Callable[..., Server]) -> None:
    # Three requests must be under way at once, or the barrier breaks; the later a batch, the sooner its answer.
    barrier, turn, answered = threading.Barrier(3), threading.Condition(), set()

    def answer(body: Body) -> Answer:
        barrier.wait(60)
        batch = indices(body)[0] // 2 % 3
        with turn:
            turn.wait_for(lambda: len(answered) % 3 == 2 - batch, 60)
            answered.add(indices(body)[0])
            turn.notify_all()
        return well([index / 8 for index in indices(body)])

    server = serve(answer)
    scored = score(server.url, rows(12), service_batch_size=2, service_concurrency=3)
    assert scored.scores_N.tolist() == [index / 8 for index in range(12)]
    assert sorted(len(body["completions"]) for body in server.bodies) == [2] * 6
    assert len(server.connections) == 3


def test_more_requests_at_once_than_a_client_has_connections_by_default(serve: Callable[..., Server]) -> None:
    barrier = threading.Barrier(120)

    def answer(body: Body) -> Answer:
        barrier.wait(60)
        return well([index / 8 for index in indices(body)])

    scored = score(serve(answer).url, rows(120), service_batch_size=1, service_concurrency=120, service_retries=0)
    assert scored.errors == {}
    assert scored.scores_N.tolist() == [index / 8 for index in range(120)]


def test_service_length(serve: Callable[..., Server]) -> None:
    """A request with too few or too many scores is refused with both counts; the others' stay where they belong."""
    server = serve(lambda body: well([float(i) for i in indices(body)][: 1 if 2 in indices(body) else 2]))
    scored = score(server.url, rows(5), service_batch_size=2)
    assert scored.scores_N[[0, 1, 4]].tolist() == [0.0, 1.0, 4.0]
    assert np.isnan(scored.scores_N[[2, 3]]).all()
    assert set(scored.errors) == {2, 3}
    assert "gave 1 rewards for 2 completions" in scored.errors[2] == scored.errors[3]

    server = serve(lambda _: well([1.0, 2.0, 3.0]))
    assert "gave 3 rewards for 2 completions" in score(server.url, rows(2)).errors[1]
    server = serve(lambda _: well([1.0, 2.0], errors=["only one"]))
    assert "gave 1 errors for 2 completions" in score(server.url, rows(2)).errors[1]


def test_values_that_are_no_scores_are_errors_of_their_rows(serve: Callable[..., Server]) -> None:
    values = ["NaN", "-Infinity", "1e39", '"0.5"', "true", "[1]", "3", "-2.5e-3", "null", "1" + "0" * 400]
    server = serve(lambda _: (200, {}, f'{{"rewards": [{", ".join(values)}]}}'.encode()))
    scored = score(server.url, rows(10))
    assert scored.scores_N[[6, 7]].tolist() == [3.0, -0.0025]
    assert np.isnan(np.delete(scored.scores_N, [6, 7])).all()
    assert sorted(scored.errors) == [0, 1, 2, 3, 4, 5, 9]
    assert "the service gave 'NaN' for it" in scored.errors[0]
    assert "'\"0.5\"'" in scored.errors[3]


def test_the_service_says_why(serve: Callable[..., Server]) -> None:
    server = serve(lambda _: well([None, 1.0, 2.0], errors=["too long", None, {"code": 7}]))
    scored = score(server.url, rows(3))
    assert scored.errors == {0: "the service says 'too long'", 2: "the service says '{\"code\": 7}'"}
    assert scored.scores_N[1] == 1.0


def test_scores_of_openrlhf(serve: Callable[..., Server]) -> None:
    server = serve(lambda _: (200, {}, b'{"scores": [1, 2], "extra_logs": {}}'))
    assert score(server.url, rows(2)).scores_N.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<html>Please log in", "not JSON: '<html>Please log in'"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"score": [1, 2]}', 'without a list under "rewards": \'{"score": [1, 2]}\''),
        (b"[1, 2]", 'without a list under "rewards"'),
        (b'{"rewards": 3, "scores": [1, 2]}', 'without a list under "rewards"'),
        (b'{"rewards": [1, 2], "errors": "x"}', "no list under 'errors'"),
        (b"x" * 1000, f"'{'x' * 200}'..."),
    ],
)
def test_wrong_content(serve: Callable[..., Server], content: bytes, told: str) -> None:
    server = serve(lambda _: (200, {}, content))
    scored = score(server.url, rows(2))
    assert set(scored.errors) == {0, 1}
    assert told in scored.errors[0]
    assert len(server.bodies) == 1


def test_failing_then_well(serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(
        [(500, {}, b"out of memory"), (429, {"Retry-After": "1"}, b"slow down"), (503, {}, b""), well([1.0, 2.0])]
    )
    server = serve(lambda _: next(answers))
    scored = score(server.url, rows(2), service_retries=3)
    assert scored.scores_N.tolist() == [1.0, 2.0]
    assert scored.errors == {}
    said = capsys.readouterr().err
    assert "answered 500 Internal Server Error: 'out of memory'; attempt 2 in 0.0 s" in said
    assert re.search(r"answered 429 Too Many Requests: 'slow down'; attempt 3 in 1\.\d s", said)


def test_out_of_retries(serve: Callable[..., Server]) -> None:
    server = serve(lambda _: (503, {}, b"starting"))
    scored = score(server.url, rows(6), service_batch_size=2, service_concurrency=1, service_retries=2)
    assert set(scored.errors) == set(range(6))
    assert "answered 503 Service Unavailable: 'starting' (attempts: 3)" in scored.errors[0]
    # Once the service is known to be down, what follows is tried once.
    assert "(attempts: 1)" in scored.errors[5]
    assert len(server.bodies) == 3 + 1 + 1


def test_what_is_not_tried_again(serve: Callable[..., Server]) -> None:
    other = serve(lambda _: well([1.0]))
    for status, headers, told in [
        (400, {}, "answered 400 Bad Request: 'no'"),
        (401, {}, "answered 401 Unauthorized (sent: the token of SERVICE_TOKEN): 'no'"),
        (307, {"Location": other.url}, "redirects are not followed"),
        (503, {"Retry-After": "7200"}, "asks to be left alone for 7200 s"),
    ]:
        server = serve(lambda _, answer=(status, headers, b"no"): answer)
        assert told in score(server.url, rows(1), token=True).errors[0]
        assert len(server.bodies) == 1
    assert not other.bodies


def test_a_service_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
    scored = score(url, rows(2), service_retries=0)
    assert f"the service {url} cannot be connected to (All connection attempts failed" in scored.errors[1]


def test_a_connection_that_is_broken_off(serve: Callable[..., Server]) -> None:
    # Content that is shorter than announced, then the end.
    server = serve(lambda _: (200, {"Content-Length": "1000", "Connection": "close"}, b'{"rewards": [1]}'))
    assert "broke off the connection" in score(server.url, rows(1), service_retries=0).errors[0]


def test_slow(serve: Callable[..., Server]) -> None:
    release = threading.Event()
    asked = []

    def answer(body: Body) -> Answer:
        asked.append(1)
        if len(asked) == 1:
            release.wait(60)
        return well([4.0])

    server = serve(answer)
    scored = score(server.url, rows(1), limit=0.3, service_retries=0)
    assert "gave no whole answer within 0.3 s (attempts: 1)" in scored.errors[0]
    assert score(server.url, rows(1), service_retries=0).scores_N.tolist() == [4.0]
    release.set()


def test_an_address_of_this_machine(serve: Callable[..., Server]) -> None:
    server = serve(lambda _: well([1.0]))
    address = {"quality": server.url}
    assert score("http://reward.invalid/score", rows(1), service_addresses=address).scores_N.tolist() == [1.0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7),
        ("", 0),
        ("soon", 0),
        ("-3", 0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2015 07:00:00 GMT", 0),
    ],
)
def test_retry_after(header: str, seconds: float) -> None:
    assert seconds_to_wait(header, datetime(2015, 10, 21, 7, 28, tzinfo=UTC)) == seconds


@pytest.mark.parametrize("value", [None, "", "two words", "sk9x\n", "schlüssel"])
def test_a_token_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("SERVICE_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVICE_TOKEN", value)
    with pytest.raises(UserError, match="SERVICE_TOKEN") as told:
        score("http://127.0.0.1:9/score", rows(1), token=True)
    assert not value or value.strip() not in str(told.value)


def test_an_echoed_token_is_hidden(serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the service quotes it in: an error's body, a value, a reason, a redirect."""
    quoted = json.dumps({"headers": f"Bearer {TOKEN}"}).encode()
    padded = b"x" * (service_shown() - len("Bearer ") - 4) + f"Bearer {TOKEN}".encode()
    for status, headers, body in [
        (500, {}, quoted),
        (403, {}, f"Bearer {TOKEN} is not known".encode()),
        (200, {}, padded),
        (200, {}, quoted),
        (200, {}, json.dumps({"rewards": [TOKEN]}).encode()),
        (200, {}, json.dumps({"rewards": [None], "errors": [f"who is {TOKEN}?"]}).encode()),
        (302, {"Location": "http://127.0.0.1/?t=q9%2FZx%227-secret"}, b""),
    ]:
        server = serve(lambda _, answer=(status, headers, body): answer)
        scored = score(server.url, rows(1), token=True, service_retries=1)
        assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
        for text in (scored.errors[0], capsys.readouterr().err):
            assert "secret" not in text
            assert "Zx" not in text


def test_the_token_of_a_whole_stage_is_nowhere(serve: Callable[..., Server], tmp_path: Path, rloo: CommandLine) -> None:
    """In no artifact, record or database, though the service quotes it in an error and asks to come again."""
    project = Project.create(tmp_path / "project")
    turns = iter(range(100))

    def answer(body: Body) -> Answer:
        first = next(turns) == 0
        if first:
            return 503, {}, f"busy, Bearer {TOKEN}".encode()
        n = len(body["completions"])
        return well([0.5, *[None] * (n - 1)], errors=[None, *[f"no score for {TOKEN}"] * (n - 1)])

    server = serve(answer)
    params = project.params()
    params["rewards"] = [{"name": "quality", "url": server.url, "token_env": "SERVICE_TOKEN", "on_error": "invalid"}]
    params["execution"] |= {"service_batch_size": 4}
    del params["sources"]["reward"]
    project.write_params(params)
    written = ""
    for command in (["prepare"], ["rollouts", "0001"], ["rewards", "0001"], ["track"]):
        outcome = rloo(project, *command)
        assert outcome.code == 0, outcome.stderr
        written += outcome.stdout + outcome.stderr
    assert "answered 503 Service Unavailable: 'busy, Bearer (hidden)'; attempt 2" in written
    assert server.headers[-1]["Authorization"] == f"Bearer {TOKEN}"
    rewards = pq.read_table(project.root / "artifacts" / "rewards" / "0001" / "shard-00000.parquet")
    assert "no score for (hidden)" in str(rewards["reward_error"].to_pylist())
    assert project.json("metrics/rewards/0001.json")["reward/quality_errors"] == 12
    assert (project.root / "mlflow.db").exists()
    for path in (path for path in project.root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert b"q9/Zx" not in content, path
        assert b"7-secret" not in content, path
    assert "secret" not in written


def service_shown() -> int:
    from rloo_pipeline.rewards.protocol import SHOWN

    return SHOWN


def test_the_server_in_the_docs(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "rewards.md").read_text()
    (code,) = re.findall(r"```python\n(import json, sys\n.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 10
    (tmp_path / "server.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "server.py", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        table = rows(3, answer=["answer 0", "answer 5", "answer 2"])
        scored = score(f"http://127.0.0.1:{port}/", table, service_retries=8, service_batch_size=2)
    finally:
        server.terminate()
        server.wait()
    assert scored.errors == {}
    assert scored.scores_N.tolist() == [1.0, 0.0, 1.0]
