"""vLLM's OpenAI server in a process of its own, and an OpenAI client for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import EngineError, environment

START_S = 240  # a process for the server and one for the engine, each of which imports torch and vLLM


@contextmanager
def server(model: Path, *options: str) -> Iterator[Any]:
    """An ``openai.OpenAI`` client of a server of ``model``; the server ends with the block.

    Raises:
        EngineError: the server ended, or did not answer in time; with the end of its log.
    """
    import openai

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "256"]
    command += ["--max-num-seqs", "8", "--served-model-name", "model", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            _wait(client, process, log)
            yield client
        finally:
            _end(process)


def _wait(client: Any, process: subprocess.Popen[str], log: Any) -> None:
    import openai

    end = time.monotonic() + START_S
    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                raise EngineError(log.read()[-6000:]) from None
            time.sleep(1)


def _end(process: subprocess.Popen[str]) -> None:
    """The server's own end takes its engine along; what is left of the session ends after a while."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
