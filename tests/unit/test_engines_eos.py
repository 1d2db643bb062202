import json

import pytest

from rloo_pipeline.engines.eos import eos_token_ids
from rloo_pipeline.errors import UserError
from tests.tiny import make_policy


def write(directory, **files):
    for name, values in files.items():
        (directory / f"{name}.json").write_text(json.dumps(values))


def test_saved_policy_has_the_eos_of_its_tokenizer(tmp_path):
    assert eos_token_ids(make_policy(tmp_path)) == (1,)


def test_ids_of_all_files_are_joined(tmp_path):
    write(
        tmp_path,
        generation_config={"eos_token_id": [9, 4]},
        config={"eos_token_id": 2},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
    )
    assert eos_token_ids(tmp_path) == (2, 4, 7, 9)


def test_config_of_the_language_part_counts(tmp_path):
    write(tmp_path, config={"text_config": {"eos_token_id": [5, 6]}})
    assert eos_token_ids(tmp_path) == (5, 6)


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {"eos_token": {"content": "<end>"}},
            "tokenizer": {"model": {"vocab": {"a": 0, "<end>": 3}}},
        },
        {
            "tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"3": {"content": "<end>"}}},
        },
        {
            "tokenizer_config": {},
            "special_tokens_map": {"eos_token": {"content": "<end>"}},
            "tokenizer": {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0], ["<end>", -3.0]]}},
        },
    ],
)
def test_tokenizer_eos_is_found_in_every_layout(tmp_path, files):
    write(tmp_path, **files)
    assert eos_token_ids(tmp_path) == (3,)


def test_a_model_without_eos_has_none(tmp_path):
    write(tmp_path, config={"eos_token_id": None}, tokenizer_config={"eos_token": None})
    assert eos_token_ids(tmp_path) == ()


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path)
