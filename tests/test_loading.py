from __future__ import annotations

import pytest

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
