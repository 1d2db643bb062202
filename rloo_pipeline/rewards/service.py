"""Reward services: completions scored over HTTP."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import say
from rloo_pipeline.reward_config import ServiceReward
from rloo_pipeline.rewards.protocol import Refused, read_answer, request, shown
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.tracking.secrets import hide_in_url, without

BACKOFF, LONGEST_BACKOFF = 1.0, 60.0  # seconds; the first wait is up to BACKOFF, each further one up to twice as long
LONGEST_WAIT = 600.0  # seconds; a service that asks to be left alone for longer is as good as down


class _Again(Refused):
    """A failure that may pass; `wait`: how long the service asks to be left alone, seconds."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


@contextmanager
def open_service(config: ServiceReward, execution: ExecutionConfig) -> Iterator[Callable[[pa.Table], Scored]]:
    """What scores rows, completions joined with their prompts' columns, by requests to the service.

    A request that fails after its retries is the error of its rows. Raises UserError if the address or the token
    cannot be used.
    """
    service = _Service(config, execution)
    with _loop_in_a_thread() as run:
        try:
            yield lambda rows: run(service.score(rows))
        finally:
            run(service.client.aclose())


class _Service:
    def __init__(self, config: ServiceReward, execution: ExecutionConfig) -> None:
        self.config, self.execution = config, execution
        self.token = _token(config)
        self.slots = asyncio.Semaphore(execution.service_concurrency)
        self.down = False  # whether the last request failed in all its attempts
        try:
            self.address = httpx.URL(execution.service_addresses.get(config.name, config.url))
        except httpx.InvalidURL as error:
            raise UserError(f"reward {config.name}: its address is not one of HTTP ({error}); mend it") from error
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        # A redirect could take the token to another host. The time limit is of the whole request, set below, so none
        # may wait for a connection while it runs: `slots` alone bounds how many there are.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(headers=headers, follow_redirects=False, timeout=None, limits=limits)

    async def score(self, rows: pa.Table) -> Scored:
        size = self.execution.service_batch_size
        starts = range(0, rows.num_rows, size)
        parts = await asyncio.gather(*(self._batch(rows.slice(start, size)) for start in starts))
        scores_N = np.concatenate([np.empty(0), *(part.scores_N for part in parts)])
        errors = {
            start + row: reason
            for start, part in zip(starts, parts, strict=True)
            for row, reason in part.errors.items()
        }
        return Scored(scores_N, errors)

    async def _batch(self, rows: pa.Table) -> Scored:
        async with self.slots:
            try:
                return read_answer(await self._answer(request(rows)), rows.num_rows, self.token)
            except Refused as refused:
                reason = f"the service {hide_in_url(self.config.url)} {refused}"
                return Scored(np.full(rows.num_rows, np.nan), dict.fromkeys(range(rows.num_rows), reason))

    async def _answer(self, body: bytes) -> bytes:
        # Once a request has failed to the end, those after it try once: a stage with hundreds of them ends soon.
        attempts = 1 if self.down else self.execution.service_retries + 1
        retrying = AsyncRetrying(
            stop=stop_after_attempt(attempts),
            wait=_wait,
            retry=retry_if_exception_type(_Again),
            before_sleep=self._tell,
            reraise=True,
        )
        try:
            answer: bytes = await retrying(self._ask, body)
        except _Again as failed:
            self.down = True
            raise Refused(f"{failed} (attempts: {attempts})") from failed
        self.down = False
        return answer

    async def _ask(self, body: bytes) -> bytes:
        limit = self.config.time_limit
        try:
            async with asyncio.timeout(limit):
                response = await self.client.post(self.address, content=body)
        except TimeoutError as error:
            raise _Again(f"gave no whole answer within {limit:g} s") from error
        except httpx.TransportError as error:
            raise _Again(f"{_network(error)} ({str(error) or type(error).__name__})") from error
        except httpx.RequestError as error:
            raise Refused(f"gave an answer that cannot be read ({type(error).__name__}: {error})") from error
        if response.is_success:
            return response.content
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> Refused:
        # The standard's phrase and not the answer's, which could hold anything.
        what = f"answered {response.status_code} {httpx.codes.get_reason_phrase(response.status_code)}".rstrip()
        if response.is_redirect:
            where = without(self.token, hide_in_url(response.headers.get("Location", "")))
            return Refused(f"{what} to {where}: redirects are not followed; give the address that answers as its url")
        if response.status_code in (401, 403):
            sent = f"the token of {self.config.token_env}" if self.token else "no token, since token_env is not set"
            what += f" (sent: {sent})"
        what += f": {shown(response.text, self.token)}"
        wait = seconds_to_wait(response.headers.get("Retry-After", ""), datetime.now(UTC))
        if wait > LONGEST_WAIT:
            return Refused(f"asks to be left alone for {wait:.0f} s; it {what}")
        if response.status_code == 429 or response.is_server_error:
            return _Again(what, wait)
        return Refused(what)

    def _tell(self, state: RetryCallState) -> None:
        failed, seconds = state.outcome.exception(), state.next_action.sleep  # type: ignore[union-attr]
        say(
            f"reward {self.config.name}: {hide_in_url(str(self.address))} {failed}; attempt {state.attempt_number + 1} "
            f"in {seconds:.1f} s"
        )


def _network(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "cannot be connected to"
    if isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError):
        return "broke off the connection"
    return "could not be reached"


def _token(config: ServiceReward) -> str | None:
    if config.token_env is None:
        return None
    token = os.environ.get(config.token_env, "")
    what = f"reward {config.name}: the environment variable {config.token_env} (token_env)"
    if not token:
        raise UserError(f"{what} is not set or is empty; put the service's token there, or remove token_env")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"{what} holds a space, a line break or another character that no token has; set it anew")
    return token


def _wait(state: RetryCallState) -> float:
    failed = state.outcome.exception()  # type: ignore[union-attr]
    asked = failed.wait if isinstance(failed, _Again) else 0.0
    return asked + wait_random_exponential(multiplier=BACKOFF, max=LONGEST_BACKOFF)(state)


def seconds_to_wait(retry_after: str, now: datetime) -> float:
    """Seconds that a Retry-After header asks to wait, 0 if it is no number and no date (RFC 9110, section 10.2.3)."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


@contextmanager
def _loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines to their end, in a thread of its own: a notebook's thread already runs an event loop."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
