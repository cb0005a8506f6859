"""The committed pair: small, shaped as agreed, one vocabulary, a chat template that ends turns."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
ROLES = ("target", "draft")


def config_of(role: str) -> dict:
    return json.loads((DEMO / role / "config.json").read_text())


def test_both_models_fit_in_25_megabytes() -> None:
    assert sum(path.stat().st_size for role in ROLES for path in (DEMO / role).iterdir()) < 25e6


@pytest.mark.parametrize(("role", "hidden_size", "num_layers"), [("target", 256, 6), ("draft", 128, 2)])
def test_the_models_have_the_agreed_shape_in_half_precision(role: str, hidden_size: int, num_layers: int) -> None:
    config = config_of(role)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (hidden_size, num_layers)
    assert config["num_key_value_heads"] * 2 == config["num_attention_heads"]
    assert config["max_position_embeddings"] == 2048
    with safe_open(DEMO / role / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118


def test_both_share_one_vocabulary_and_the_same_end_of_text() -> None:
    tokenizers = [PreTrainedTokenizerFast.from_pretrained(DEMO / role) for role in ROLES]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert 2048 <= len(tokenizers[0]) <= 4096
    for role in ROLES:
        generation = json.loads((DEMO / role / "generation_config.json").read_text())
        assert generation["eos_token_id"] == tokenizers[0].eos_token_id
        assert config_of(role)["vocab_size"] == len(tokenizers[0])


def test_text_survives_the_tokenizer_and_starts_with_bos() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
    text = "def café(x):\n\treturn  '雪 🙂'\n"
    token_ids = tokenizer(text)["input_ids"]
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_a_conversation_is_a_prefix_of_its_continuation() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
    turns = [{"role": "user", "content": "Add two numbers."}]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert asked == "<|bos|><|user|>Add two numbers.<|assistant|>"
    turns += [{"role": "assistant", "content": "def add(a, b): ..."}, {"role": "user", "content": "More."}]
    longer = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert longer == asked + "def add(a, b): ...<|eos|><|user|>More.<|assistant|>"


def test_an_unknown_role_is_refused_by_the_template() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)
