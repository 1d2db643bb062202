"""Outputs in the DVC cache: which objects they are made of, and which revisions of the project hold them."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from dvc.repo import Repo

LOCK = "dvc.lock"


def open_repo(root: Path) -> "Repo":
    """The DVC project at `root`; raises UserError if there is none, or no git repository that it asks for."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError

    try:
        return Repo(str(root))
    except SCMError as error:
        raise UserError(f"{error}; `git init` makes one, or `dvc config core.no_scm true` does without") from error
    except DvcException as error:
        raise UserError(f"{root.resolve()}: no DVC project ({error}); run this in the folder with dvc.yaml") from error


def git(root: Path, *arguments: str) -> str | None:
    """What a git command prints; None if it fails, or if there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def recorded(text: str, where: str) -> dict[str, str]:
    """The hash of every output in the text of a dvc.lock, by path; raises UserError if it is not readable."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        stages: Mapping[str, Any] = (YAML(typ="safe").load(text) or {}).get("stages", {})
        return {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", ())}
    except (YAMLError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{where}: not readable as a dvc.lock ({error}); restore it from git") from error


def recorded_here(root: Path) -> dict[str, str]:
    """The hash of every output in the project's dvc.lock, by path; raises UserError if there is no such file."""
    path = root / LOCK
    if not path.exists():
        raise UserError(f"{path}: no such file; run `dvc repro` first")
    return recorded(path.read_text(encoding="utf-8"), str(path))


def other_revisions(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Every other branch, tag and DVC experiment by its name, with the outputs that its dvc.lock records."""
    current = (git(root, "symbolic-ref", "-q", "HEAD") or "").strip()
    refs = (git(root, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags", "refs/exps") or "").split()
    for ref in refs:
        # DVC's other references below refs/exps, as that to the experiment in progress, are no results.
        found = re.fullmatch("refs/(?:(heads|tags)|exps/[0-9a-f]{2}/[0-9a-f]{38})/(.+)", ref)
        text = git(root, "show", f"{ref}:./{LOCK}") if found and ref != current else None
        if found and text is not None:
            kind = {"heads": "branch", "tags": "tag", None: "experiment"}[found[1]]
            yield f"{kind} {found[2]}", recorded(text, f"{ref}:{LOCK}")


def files_of(repo: "Repo", md5: str) -> dict[str, str] | None:
    """The hashes of an output's files by relative path, "." for a lone file; None if the cache lacks its listing."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    if not md5.endswith(".dir"):
        return {".": md5}
    if not object_path(repo, md5).exists():
        return None
    listing = Tree.load(repo.cache.local, HashInfo("md5", md5))
    return {"/".join(parts): info.value for parts, _, info in listing}


def object_path(repo: "Repo", md5: str) -> Path:
    """Where the cache keeps the object of a hash."""
    return Path(repo.cache.local.oid_to_path(md5))
