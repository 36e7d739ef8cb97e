from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvloom.errors import ModelError
from kvloom.loading import load


def test_load_says_what_is_wrong_with_a_model_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    with pytest.raises(ModelError, match="does not exist"):
        load(str(folder / "nowhere"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(str(folder))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no weights"):
        load(str(folder))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot load model"):
        load(str(folder))
    with pytest.raises(ModelError, match="unknown bundled model 'bundled:other'; there is: bundled:smollm2"):
        load("bundled:other")


def test_missing_weights_are_not_replaced_by_random_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    build(FAMILIES["llama"]).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    load(str(folder))
    weights = load_file(folder / "model.safetensors")
    gone = "model.layers.2.mlp.up_proj.weight"
    save_file(
        {name: w for name, w in weights.items() if name != gone},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match=rf"lacks 1 of its weights \({gone}"):
        load(str(folder))
