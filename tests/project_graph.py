"""The dvc.yaml of projects without the package's source, made from the repository's own.

After an edit of the repository's: python -m tests.project_graph
"""

from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
OWN, OF_PROJECTS = REPOSITORY / "dvc.yaml", REPOSITORY / "rloo_pipeline" / "project" / "stages.yaml"
NUMBERS = """\
  # The numbers of the installed package, looked at in every run: a stage whose number has risen runs again.
  algorithms:
    cmd: rloo algorithms
    always_changed: true
    outs:
      - algorithms.yaml:
          cache: false
          persist: true

"""


def of_projects() -> str:
    """The repository's graph with the installed package in the place of its source."""
    text = OWN.read_text(encoding="utf-8").replace("rloo_pipeline/algorithms.yaml", "algorithms.yaml")
    return text.replace("stages:\n", f"stages:\n{NUMBERS}", 1)


if __name__ == "__main__":
    OF_PROJECTS.write_text(of_projects(), encoding="utf-8")
