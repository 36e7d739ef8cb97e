"""Loading a causal language model and its tokenizer from a folder, the hub, or the bundled package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvloom.bundled import BUNDLED, bundled_folder
from kvloom.errors import ModelError


def load(
    name_or_path: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, Any]:
    """The causal language model and tokenizer of a folder, a hub name or "bundled:smollm2".

    Raises ``ModelError`` with one sentence when either cannot be loaded.
    """
    source = str(_resolve(name_or_path))
    if dtype is None:
        on_cpu = torch.device(device or "cpu").type == "cpu" and "device_map" not in model_kwargs
        dtype = torch.float32 if on_cpu else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **model_kwargs
        )
        model, info = loaded
        model = model if device is None else model.to(device)
    except Exception as error:  # transformers raises nearly every type there is
        reason = " ".join(str(error).split()) or "no reason given"
        raise ModelError(f"cannot load model {name_or_path!r}: {type(error).__name__}: {reason}") from error
    missing = sorted(info["missing_keys"]) + [str(key) for key in info["mismatched_keys"]]
    if missing:
        raise ModelError(
            f"model {name_or_path!r} lacks {len(missing)} of its weights ({missing[0]}, ...), which would "
            f"be random; "
            "download it completely"
        )
    return model, tokenizer


def _resolve(name_or_path: str) -> Path | str:
    if name_or_path.startswith("bundled:"):
        if name_or_path != BUNDLED:
            raise ModelError(f"unknown bundled model {name_or_path!r}; there is: {BUNDLED}")
        return bundled_folder()
    path = Path(name_or_path).expanduser()
    looks_local = path.exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if not looks_local:
        return name_or_path
    if not path.is_dir():
        raise ModelError(
            f"model folder {name_or_path!r} does not exist; give a folder with config.json and weights, or "
            f"a hub name"
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {name_or_path!r} has no config.json; it is not a transformers model")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(
            f"model folder {name_or_path!r} has no weights (*.safetensors); download the model completely"
        )
    return path
