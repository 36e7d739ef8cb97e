"""Fixtures: the command line as its own processes, and a tiny model with a real tokenizer for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Kvloom

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "bridge.md": "# The bridge\n\nThe old bridge crosses the river Lune. It was built in 1549 of stone.\n",
    "mill.txt": "The mill stands below the bridge. Its wheel turned until 1911, when the river was moved.\n",
    "more/abbey.txt": "The abbey owned both, and sold the mill to a weaver Ann Hale for ninety pounds.\n",
}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    yield server
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


@pytest.fixture
def kvloom(fork_server: subprocess.Popen[str], tmp_path: Path) -> Kvloom:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path / "home"),
        "KVLOOM_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return Kvloom(fork_server, tmp_path, env)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of four layers, a byte-level BPE tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*TEXTS.values(), "the passages below. Be brief. Question:"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1], chat_template=TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,  # large enough that what a token attends to decides the next one
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of three documents."""
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sixty short documents, one a line."""
    path = tmp_path / "many.jsonl"
    lines = [
        {"id": f"d{n}", "text": f"Barge {n} carried {n * 7} tons of grey stone up the river."}
        for n in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path
