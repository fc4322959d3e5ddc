"""Runs programs on a SandboxFusion server (POST /run_code), for rollouts that outgrow one machine.

The server is responsible for isolation. Requests carry the wall limit, which is also enforced here, and the memory
limit; the server sets the other limits.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from otb.sandbox import Limits, Result, Sandbox, SandboxFailure, Status, clean

GRACE_SECONDS = 20.0  # for the server's queue and start-up, in addition to the program's own time
# Exit statuses of programs killed for memory. The server gives no reason, and a program could print any text itself.
KILLED = (-9, 137)


class Http(Sandbox):
    """A sandbox that runs programs on a SandboxFusion server.

    Args:
        url: The server's address, such as http://host:8080, without /run_code.
        limits: Default limits of a call.
        workers: Requests in flight at the same time; None = one per core of this process.
    """

    def __init__(self, url: str, limits: Limits | None = None, workers: int | None = None):
        super().__init__(limits, workers)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"sandbox.url={url!r} is not an http address. Try sandbox.url=http://localhost:8080.")
        self.url = url.rstrip("/").removesuffix("/run_code")

    def check(self) -> None:
        (result,) = self._attempt(["print(1 + 1)"], self.limits)
        if result.status != "ok" or result.stdout.strip() != "2":
            raise SandboxFailure(
                f"sandbox.url={self.url}: `print(1 + 1)` ended with {result.status!r} ({result.text!r}) instead of 2. "
                "Is a SandboxFusion server running there? Its image is volcengine/sandbox-fusion, port 8080."
            )

    def _attempt(self, codes: Sequence[str], limits: Limits) -> list[Result]:
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda code: self._post(code, limits), codes))

    def _post(self, code: str, limits: Limits) -> Result:
        body = {
            "code": code.encode("utf-8", "replace").decode(),  # a request cannot hold lone surrogates
            "language": "python",
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": limits.memory_bytes >> 20,
        }
        request = urllib.request.Request(
            f"{self.url}/run_code", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limits.wall_seconds + GRACE_SECONDS) as response:
                return read_answer(json.load(response), limits)
        except urllib.error.HTTPError as error:
            return Result("sandbox_failure", "", f"{self.url} answered {error.code} {error.reason}", 0.0)
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            return Result("sandbox_failure", "", f"{self.url}: {type(error).__name__}: {error}", 0.0)


def read_answer(answer: dict, limits: Limits) -> Result:
    """Turns SandboxFusion's RunCodeResponse into a Result. Raises KeyError or TypeError for any other answer."""
    run = answer.get("run_result") or {}
    if answer["status"] == "SandboxError" or run.get("status") not in ("Finished", "TimeLimitExceeded"):
        return Result("sandbox_failure", "", str(answer.get("message") or run or answer["status"]), 0.0)
    code, seconds = run.get("return_code"), run.get("execution_time") or 0.0
    status: Status
    out, err = run.get("stdout") or "", run.get("stderr") or ""
    if run["status"] == "TimeLimitExceeded":
        status, err = "timeout", f"TimeoutError: stopped after {limits.wall_seconds:g} s."
    elif max(len(out), len(err)) > limits.output_characters:
        status = "output_limit"
    elif code in KILLED:
        status, err = "memory", err or f"MemoryError: killed at {limits.memory_bytes >> 20} MiB."
    else:
        status = "ok" if code == 0 else "user_error"
        err = err or ("" if code == 0 else f"exit code {code}")
    return Result(status, clean(out, limits.output_characters), clean(err, limits.output_characters), seconds)
