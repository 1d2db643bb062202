"""Kill `dvc repro` of two iterations at random moments, run it again, and compare with an undisturbed run.

    python scripts/kill_at_random.py --moments 50 --seed 0

The project is the tests' one: a random two-layer model, eight prompts, every stage a real process. One run is left
alone and timed. Then, for every moment, a fresh copy of the project is started, killed (drawn by lot: the stage, DVC,
or the whole process group, with SIGKILL), and started again at once until it ends. Told for each: when, what was
killed in which stage, whether all processes were gone within 10 s, and whether the result is identical: every
fingerprint in a manifest, every byte of artifacts, metrics and provenance, and dvc.lock. `--kills-per-run` kills one
run several times before it may end, which tells as much in less time. Where DVC itself was killed while it rewrote
dvc.lock or its rwlock file it refuses to start until `rloo clean` has mended them: that is done and counted.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.conftest import varied_project
from tests.project import Project, environment

VICTIMS = ("stage", "dvc", "group")
FOLDERS = ("artifacts", "metrics", "provenance")


def start(project: Project) -> "subprocess.Popen[bytes]":
    """`dvc repro` in a process group of its own; its output is added to the file `log`."""
    with (project.root / "log").open("ab") as log:
        return subprocess.Popen(
            ["dvc", "repro"], cwd=project.root, env=environment(), stdout=log, stderr=log, process_group=0
        )


def command(process: psutil.Process) -> list[str]:
    """The names on a process's command line without the interpreter's; empty if it has just ended."""
    try:
        return [Path(word).name for word in process.cmdline()[1:]]
    except psutil.NoSuchProcess:
        return []


def kill(dvc: "subprocess.Popen[bytes]", victim: str) -> tuple[str, bool]:
    """Kill what was drawn; returns what it was and at what work, and whether all was gone within 10 s."""
    processes = [psutil.Process(dvc.pid), *psutil.Process(dvc.pid).children(recursive=True)]
    commands = {process: command(process) for process in processes[1:]}
    stages = [process for process, words in commands.items() if "rloo" in words[:2]]
    at = " ".join(commands[stages[-1]]) if stages else "DVC's own work"
    if victim == "stage" and not stages:
        victim = "dvc"
    if victim == "group":
        os.killpg(dvc.pid, signal.SIGKILL)
    else:
        with suppress(psutil.NoSuchProcess):
            (stages[-1] if victim == "stage" else processes[0]).kill()
    dvc.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    return f"{victim} at {at}", not alive


def finish(project: Project) -> bool:
    """Run to the end; returns whether `rloo clean` had to mend DVC's files first. Raises if it does not end well."""
    if start(project).wait() == 0:
        return False
    mended = project.rloo("clean").stdout
    if "cut short" not in mended or start(project).wait() != 0:
        raise RuntimeError(f"run again, it fails:\n{(project.root / 'log').read_text()[-3000:]}")
    return True


def result(project: Project) -> dict[str, object]:
    """Fingerprints by manifest, bytes by file, and what dvc.lock says."""
    files = [path for folder in FOLDERS for path in (project.root / folder).rglob("*") if path.is_file()]
    found: dict[str, object] = {path.relative_to(project.root).as_posix(): path.read_bytes() for path in files}
    manifests = {name: data for name, data in found.items() if name.endswith("manifest.json")}
    found |= {f"fingerprint of {name}": json.loads(str(data, "utf-8"))["fingerprint"]
              for name, data in manifests.items() if isinstance(data, bytes)}  # fmt: skip
    return found | {"dvc.lock": project.lock()}


def disturbed(project: Project, kills: int, seconds: float, dice: random.Random) -> tuple[list[str], bool, bool]:
    """Kill the run that often, then let it end; returns what was killed, whether all died in time, whether mended."""
    told, all_died, mended = [], True, False
    for _ in range(kills):
        moment, victim = dice.uniform(0, seconds / kills), dice.choice(VICTIMS)
        dvc = start(project)
        try:
            dvc.wait(moment)
        except subprocess.TimeoutExpired:
            what, died = kill(dvc, victim)
            told.append(f"{moment:.1f} s: {what}")
            all_died &= died
        else:
            if dvc.returncode != 0:
                mended |= "cut short" in project.rloo("clean").stdout
    return told, all_died, finish(project) or mended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-per-run", type=int, default=1)
    arguments = parser.parse_args()
    dice, began, counts = random.Random(arguments.seed), time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        pristine, undisturbed = varied_project(Path(folder) / "pristine"), Project(Path(folder) / "undisturbed")
        pristine.copy(undisturbed.root)
        started = time.monotonic()
        undisturbed.repro()
        seconds, expected = time.monotonic() - started, result(undisturbed)
        print(f"undisturbed: {seconds:.0f} s, {len(expected)} values to compare", flush=True)
        while counts["kills"] < arguments.moments:
            project = pristine.copy(Path(folder) / "disturbed")
            kills = min(arguments.kills_per_run, arguments.moments - counts["kills"])
            told, all_died, mended = disturbed(project, kills, seconds, dice)
            found = result(project)
            same = found == expected
            counts.update(runs=1, kills=len(told), identical=same, dead_in_time=all_died, mended=mended)
            verdict = ("identical" if same else "DIFFERENT") + ("" if all_died else ", A PROCESS LIVED ON")
            print(f"{'; '.join(told) or 'ended first'}: {verdict}", flush=True)
            if not same:
                print([key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)])
            shutil.rmtree(project.root)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{counts['kills']} kills in {counts['runs']} runs: {counts['identical']} runs ended identical, in "
        f"{counts['dead_in_time']} everything was gone within 10 s, {counts['mended']} needed DVC's files mended; "
        f"{minutes:.1f} min"
    )
    sys.exit(counts["identical"] != counts["runs"] or counts["dead_in_time"] != counts["runs"])


if __name__ == "__main__":
    main()
