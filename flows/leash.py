"""Runs a command that dies with whatever started this: `python leash.py COMMAND...`, standard input a pipe.

The pipe's other end is held by the starter alone. However it ends, kill -9 included, the kernel closes the pipe, and
the command's whole process group is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run the command in a process group of its own; returns its exit status, 128 + the signal if one killed it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        kill()

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    kill()  # a killed command may have left children
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status)  # the watching thread still reads
