"""Nothing in the package unpickles, and what loads weights is told to take safetensors and no foreign code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import REPOSITORY

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "pd.read_pickle"}
SOURCES = sorted((REPOSITORY / "rloo_pipeline").rglob("*.py")) + sorted((REPOSITORY / "flows").rglob("*.py"))


def findings(tree: ast.Module) -> Iterator[str]:
    """What unpickles, or loads a model by a call that might."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    name, settings = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in CALLS or settings.get("allow_pickle", "False") != "False" or settings.get("typ") == "'unsafe'":
        yield ast.unparse(node)
    # A GGUF file holds tensors and values alone.
    loads_model = name.endswith(".from_pretrained") and "Model" in name and "gguf_file" not in settings
    if loads_model and settings.get("use_safetensors") != "True":
        yield ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_no_pickle(path: Path) -> None:
    assert list(findings(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "read(path, allow_pickle=True)",
        "YAML(typ='unsafe')",
        "AutoModelForCausalLM.from_pretrained(path)",
        "AutoModel.from_pretrained(path, use_safetensors=None)",
    ],
)
def test_what_is_found(text: str) -> None:
    assert len(list(findings(ast.parse(text)))) == 1


def test_what_is_allowed() -> None:
    allowed = "AutoModel.from_pretrained(path, use_safetensors=True); AutoTokenizer.from_pretrained(path)"
    assert list(findings(ast.parse(allowed))) == []
