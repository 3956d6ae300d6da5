"""A Python process that keeps serving op calls under an environment of its own.

The instruction set is chosen once per process, so comparing two of them takes two processes; keeping them alive saves
the second of importing torch for every comparison. Messages are pickles with an 8-byte length in front.

    worker = IsaWorker(BLOCKSCALE_MAX_ISA="avx2")
    output = worker.call("fp8_scaled_mm_cpu", x, packed, scales, [128, 128], None, torch.float32, True)
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys

import torch


def isa_table() -> dict:
    """isa_info of this process, the list keyed by name."""
    info = json.loads(torch.ops.blockscale.isa_info())
    return {**info, "isas": {row["name"]: row for row in info["isas"]}}


def send(stream, value) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    stream.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def receive(stream):
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError("the worker ended")
    return torch.load(io.BytesIO(stream.read(struct.unpack("<Q", header)[0])), weights_only=False)


class IsaWorker:
    def __init__(self, *, threads: int | None = 2, **environment: str):
        """`threads` is given to torch.set_num_threads; None leaves the choice to the environment."""
        variables = {key: value for key, value in os.environ.items() if key != "BLOCKSCALE_MAX_ISA"}
        command = [sys.executable, __file__, *([] if threads is None else [str(threads)])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**variables, **environment}
        )

    def call(self, name: str, *arguments):
        """The result of an op of torch.ops.blockscale; raises what it raises."""
        send(self.process.stdin, (name, arguments))
        failed, value = receive(self.process.stdout)
        if failed:
            raise value
        return value

    def isa_info(self) -> dict:
        return json.loads(self.call("isa_info"))

    def task_count(self) -> int:
        """Threads of the worker's process."""
        return self.call("/tasks")

    def set_threads(self, count: int) -> None:
        self.call("/threads", count)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def __enter__(self) -> IsaWorker:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def serve(threads: int | None) -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the messages
    if threads is not None:
        torch.set_num_threads(threads)
    import blockscale  # noqa: F401  registers torch.ops.blockscale

    special = {"/tasks": lambda: len(os.listdir("/proc/self/task")), "/threads": torch.set_num_threads}
    while True:
        try:
            name, arguments = receive(source)
        except EOFError:
            return
        try:
            action = special.get(name) or getattr(torch.ops.blockscale, name)
            send(sink, (False, action(*arguments)))
        except Exception as error:
            send(sink, (True, error))


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else None)
