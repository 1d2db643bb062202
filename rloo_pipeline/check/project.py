"""Whether git, DVC, the graph of stages, the files of the user's own and the disk are as a run needs them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from rloo_pipeline.check.report import Report, size
from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.disk import BYTES_PER_PARAMETER
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import REWARD_MODEL, STAGES, Layout
from rloo_pipeline.sources import missing, unlisted

GRAPH = "dvc.yaml"
BESIDE = ("sources", "evaluate_initial", "history")  # stages that are no stage of an iteration


def tools(layout: Layout, report: Report) -> None:
    """git and DVC, installed and set up."""
    for tool, mark, remedy in (("git", ".git", "`git init`"), ("dvc", ".dvc", "`dvc init`")):
        if shutil.which(tool) is None:
            report.error(tool, f"no command {tool} is found; install it")
        elif (around := _around(layout.root.resolve(), mark)) is None:
            report.error(tool, f"not set up: there is no {mark} in this folder or around it; run {remedy}")
        else:
            report.ok(tool, f"set up in {around}")
    if shutil.which("rloo") is None:
        report.error("rloo", "the stages run the command rloo, which PATH does not have; activate its environment")
    if shutil.which("git") and _around(layout.root.resolve(), ".git"):
        _ignored(layout, report)


def _around(folder: Path, mark: str) -> Path | None:
    return next((place for place in (folder, *folder.parents) if (place / mark).exists()), None)


def _ignored(layout: Layout, report: Report) -> None:
    """What must be in git, and is kept out of it by a .gitignore."""
    files = ["params.yaml", GRAPH, "dvc.lock", "metrics/update/0001.json", "sources/prompts/name.json"]
    done = subprocess.run(["git", "check-ignore", *files], cwd=layout.root, capture_output=True, text=True, check=False)
    for file in done.stdout.split():
        report.warning("git", f"{file} is ignored, so no commit can bring a run back; mend .gitignore")


def rewritable(layout: Layout, params: Params, report: Report) -> None:
    """`dvc exp run -S` writes params.yaml anew, without the quotes that a text with a colon needs inside {...}."""
    from dvc.utils.serialize import dumps_yaml, loads_yaml

    written = dumps_yaml(loads_yaml(layout.params.read_text(encoding="utf-8"), typ="rt"))
    try:
        if parse_params(loads_yaml(written), layout.params) == params:
            return
        why = "its values would be others"
    except (YAMLError, UserError) as error:
        why = str(error)
    report.warning(
        "params.yaml",
        "`dvc exp run -S` writes it anew without quotes, and could not read it then; take texts with a colon out of "
        f"{{...}}, on lines of their own\n{why}",
    )


def graph(layout: Layout, params: Params, report: Report) -> None:
    """dvc.yaml has the stages that params.yaml needs, and the files that they take numbers from are there."""
    path = layout.root / GRAPH
    stages = _stages(path, report)
    if stages is None:
        return
    needed = [*BESIDE, *STAGES, *([REWARD_MODEL] if params.reward_models else [])]
    lacking = [stage for stage in needed if stage not in stages]
    if lacking:
        report.error(GRAPH, f"no stage {', '.join(lacking)}; take {GRAPH} from a project that `rloo init` has started")
    else:
        report.ok(GRAPH, f"the stages {', '.join(stages)}")
    for file in sorted(set(_params_files(stages))):
        if not (layout.root / file).is_file():
            report.error(
                GRAPH, f"stages depend on {file}, which is not there; `rloo algorithms` writes algorithms.yaml"
            )
    for folder in sorted(set(_record_folders(stages))):
        if not (layout.root / folder).is_dir():
            report.error(GRAPH, f"stages depend on the folder {folder}, which is not there; make it, with a file in it")


def _stages(path: Path, report: Report) -> dict[str, Any] | None:
    from ruamel.yaml import YAML

    if not path.is_file():
        report.error(GRAPH, "no such file; take it from a project that `rloo init` has started")
        return None
    try:
        stages = (YAML(typ="safe").load(path.read_text(encoding="utf-8")) or {}).get("stages")
    except (YAMLError, UnicodeDecodeError, AttributeError) as error:
        report.error(GRAPH, f"not readable as YAML: {error}")
        return None
    if not isinstance(stages, dict):
        report.error(GRAPH, "no mapping under stages; take the file from a project that `rloo init` has started")
        return None
    return stages


def _record_folders(stages: dict[str, Any]) -> Iterator[str]:
    """Folders of the records of the user's own files, which must be there even if empty."""
    for stage in stages.values():
        deps = (stage.get("do", stage).get("deps") or []) if isinstance(stage, dict) else []
        yield from (dep for dep in deps if isinstance(dep, str) and dep.startswith("sources/"))


def _params_files(stages: dict[str, Any]) -> Iterator[str]:
    for stage in stages.values():
        body = stage.get("do", stage) if isinstance(stage, dict) else {}
        for item in body.get("params") or []:
            if isinstance(item, dict):
                yield from item


def sources(layout: Layout, params: Params, report: Report) -> None:
    """The files of the user's own are there and listed."""
    wrong = list(unlisted(params, layout.root))
    for name, source in params.sources.items():
        trained = source.path.as_posix() in {f"artifacts/reward_models/{model}" for model in params.reward_models}
        if not (layout.root / source.path).exists() and not trained:
            wrong.append(f"sources, {name}: {missing(source.path)}")
    for text in wrong:
        report.error("sources", text)
    if not wrong:
        report.ok("sources", f"{len(params.sources)} listed: {', '.join(params.sources) or 'none'}")


def disk(layout: Layout, params: Params, parameters: int, report: Report) -> None:
    """The checkpoints of the iterations that are to come fit on the disk."""
    left = [item for item in params.iterations if not layout.metrics("update", item).exists()]
    first = 0 if layout.model("0000").exists() else 4 * parameters
    needed = first + len(left) * parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(layout.root).free
    text = (
        f"{len(left)} iterations to come write about {size(needed)} of checkpoints (weights and optimizer), "
        f"{size(free)} are free"
    )
    if needed > free:
        report.error("disk", f"{text}; make room, or shorten the chain with `rloo iterations N`")
    else:
        report.ok("disk", text)
