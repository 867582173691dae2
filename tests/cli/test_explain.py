"""`anymla explain`: the same verdicts as text and as JSON, for any machine, without torch."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
from typer.testing import CliRunner, Result

from anymla import cli
from anymla.hardware.arches import ARCHES
from anymla.hardware.probe import Machine, machine_named

PROGRAM = [sys.executable, "-c", "from anymla.cli import main; main()"]


def run(*arguments: str) -> Result:
    """Run `anymla` with these arguments in this process."""
    return CliRunner().invoke(cli.app, list(arguments))


def answer(*arguments: str) -> dict:
    """What `anymla explain ... --json` prints."""
    result = run("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def verdict(found: dict, backend: str) -> dict:
    """One backend's verdict."""
    return next(one for one in found["verdicts"] if one["backend"] == backend)


def test_json_has_the_problem_the_machine_every_verdict_and_the_choice() -> None:
    found = answer("--model", "deepseek-v3", "--tp", "8", "--machine", "cpu", "--lse")
    assert list(found) == ["problem", "machine", "verdicts", "choice", "launch"]
    assert found["problem"]["num_heads"] == 16
    assert found["problem"]["features"] == ["lse"]
    assert found["problem"]["sm_scale"] == pytest.approx(0.135234, abs=1e-6)
    assert found["machine"]["arch"] == "cpu"
    assert found["machine"]["assumed"] is True
    assert [one["backend"] for one in found["verdicts"]] == ["hopper", "aiter", "triton", "cpu"]
    assert found["choice"] == "cpu"
    for one in found["verdicts"]:
        assert set(one) == {
            "backend", "accepted", "evidence", "reasons", "quirks", "padding", "nearest"
        }  # fmt: skip
        assert one["accepted"] == (not one["reasons"])


def test_padding_is_reported_with_its_price() -> None:
    found = answer("--model", "kimi-k3", "--tp", "8", "--machine", "gfx950")
    assert verdict(found, "aiter")["padding"] == {"heads": 12, "padded_heads": 16, "price": 1.333}
    assert verdict(found, "triton")["padding"] == {"heads": 12, "padded_heads": 12, "price": 1.0}
    assert found["choice"] == "aiter"


def test_quirks_are_reported_with_their_knob_and_source() -> None:
    found = answer("--model", "deepseek-v3", "--tp", "4", "--machine", "gfx950")
    quirk, *asked = verdict(found, "aiter")["quirks"]
    assert (quirk["knob"], quirk["value"]) == ("num_kv_splits", 1)
    assert "vLLM" in quirk["source"]
    assert [one["knob"] for one in asked] == ["max_cache_gib", "finite_slot_0"]


@pytest.mark.parametrize(
    ("machine", "flavour"), [("gfx942", "fp8_e4m3fnuz"), ("gfx950", "fp8_e4m3fn"), ("sm90", "fp8_e4m3fn")]
)
def test_fp8_means_the_flavour_of_the_machine(machine: str, flavour: str) -> None:
    found = answer("--model", "glm-5", "--tp", "8", "--machine", machine, "--kv", "fp8", "--sparse")
    assert found["problem"]["kv_format"] == flavour
    assert (found["problem"]["op"], found["problem"]["topk"]) == ("sparse_decode", 2048)
    index = answer("--model", "glm-5", "--machine", machine, "--op", "index_topk")
    assert index["problem"]["kv_format"] == "index_k" + flavour.removeprefix("fp8_e4m3fn").replace(
        "uz", "_fnuz"
    )


@pytest.mark.parametrize("machine", ["gfx90a", "gfx942", "gfx1201", "sm90", "cpu"])
def test_queries_in_fp8_are_taken_over_a_cache_like_them_alone(machine: str) -> None:
    asked = ("--model", "deepseek-v3", "--machine", machine, "--dtype", "fp8")
    taker = "cpu" if machine == "cpu" else "triton"
    assert verdict(answer(*asked), taker)["accepted"]
    refused = verdict(answer(*asked, "--kv", "bf16"), taker)
    flavour = "fp8_e4m3fnuz" if machine == "gfx942" else "fp8_e4m3fn"
    assert f"q_dtype got {flavour}; needs " in "; ".join(refused["reasons"])


def test_an_indexer_of_pools_asks_for_the_best_pools() -> None:
    found = answer("--model", "glm-5.3-flash", "--machine", "gfx942", "--op", "index_topk")["problem"]
    assert (found["topk"], found["block_size"], found["num_heads"]) == (128, 4, 32)
    sparse = answer("--model", "glm-5.3-flash", "--machine", "gfx942", "--sparse")["problem"]
    assert (sparse["topk"], sparse["block_size"]) == (128 * 16 + 15, 64)
    refused = run("explain", "--model", "glm-5.3-flash", "--op", "index_topk", "--block-size", "8")
    assert refused.exit_code == 2 and "needs a multiple of 16" in refused.output


def test_a_model_with_sinks_asks_for_them_by_itself() -> None:
    assert answer("--model", "hy-v4", "--machine", "cpu")["problem"]["features"] == ["sinks"]
    asked = answer(
        "--model", "deepseek-v3", "--machine", "cpu", "--sinks", "--q-len", "3", "--dtype", "float16"
    )
    assert asked["problem"]["features"] == ["multi_token", "sinks"]
    assert (asked["problem"]["q_dtype"], asked["problem"]["kv_format"]) == ("fp16", "fp16")


def test_a_prefill_after_cached_tokens_is_asked_for_by_name() -> None:
    prefill = ("--model", "deepseek-v3", "--machine", "cpu", "--op", "prefill")
    assert answer(*prefill)["problem"]["features"] == []
    assert answer(*prefill, "--cached-context")["problem"]["features"] == ["cached_context"]


def test_without_a_machine_it_is_this_one() -> None:
    found = answer("--model", "deepseek-v3", "--block-size", "16")
    assert found["machine"]["assumed"] is False
    assert found["machine"]["packages"]["torch"]
    assert found["problem"]["block_size"] == 16


def test_several_machines_are_answered_in_one_go() -> None:
    found = answer("--model", "deepseek-v3", "--machine", "gfx942", "--machine", "sm90")
    assert [one["machine"]["arch"] for one in found["machines"]] == ["gfx942", "sm90"]
    everywhere = answer("--model", "deepseek-v3", "--machine", "all")["machines"]
    assert [one["machine"]["arch"] for one in everywhere] == list(ARCHES)
    built = dict.fromkeys(ARCHES, "triton") | {"cpu": "cpu", "gfx1250": None}
    built |= {"gfx942": "aiter", "gfx950": "aiter"}
    assert [one["choice"] for one in everywhere] == [built[arch] for arch in ARCHES]


def test_every_gpu_that_triton_compiles_for_is_named_with_its_launch_row() -> None:
    for op in ("decode", "sparse_decode", "write_cache"):
        for one in answer("--model", "deepseek-v3.2", "--op", op, "--machine", "all")["machines"]:
            takes = any(v["accepted"] for v in one["verdicts"] if v["backend"] == "triton")
            assert (one["launch"] is not None) == takes
            assert takes or one["machine"]["arch"] in ("cpu", "gfx1250")
            if one["launch"]:
                assert one["launch"]["num_warps"] >= 1


def test_what_stands_behind_another_choice_is_named_too() -> None:
    said = run("explain", "--model", "deepseek-v3", "--tp", "8", "--machine", "gfx942").stdout
    assert "choice: aiter" in said and "behind it triton, 16 rows × 32 keys" in " ".join(said.split())


def test_a_release_of_aiter_can_be_asked_about() -> None:
    asked = ("--model", "deepseek-v3", "--tp", "8", "--machine", "gfx942", "--lse")
    old = answer(*asked, "--aiter", "v0.1.16.post2")
    assert old["machine"]["packages"]["aiter"] == "v0.1.16.post2"
    assert old["choice"] == "triton"
    (reason,) = verdict(old, "aiter")["reasons"][:1]
    assert reason.startswith("aiter 0.1.16.post2 has no kernel for bf16 × bf16, 16 heads, lse")
    assert answer(*asked, "--aiter", "0.1.19")["choice"] == "aiter"
    unknown = verdict(answer(*asked, "--aiter", "9.9"), "aiter")["reasons"]
    assert [reason for reason in unknown if "is not recorded" in reason] == [
        "aiter 9.9 is not recorded; 0.1.5 to 0.1.20.post1 and HEAD are"
    ]
    text = run("explain", *asked, "--aiter", "v0.1.16.post2").stdout
    assert "assumed with aiter v0.1.16.post2 and the newest release of every other package" in text


def test_what_is_installed_here_is_imported_before_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("anymla.cli.explain")
    here = machine_named("gfx942")
    broken = replace(here, failures=(("mla_decode_fwd", "aiter cannot be imported: no libamdhip64"),))
    monkeypatch.setattr(module, "this_machine", lambda: here)
    monkeypatch.setattr(module.select, "tried", lambda asked: broken if asked is here else asked)
    found = answer("--model", "kimi-k2", "--tp", "8")
    assert (found["choice"], found["machine"]["failures"]) == ("triton", dict(broken.failures))
    assert verdict(found, "aiter")["reasons"] == ["aiter cannot be imported: no libamdhip64"]
    assert answer("--model", "kimi-k2", "--tp", "8", "--aiter", "0.1.19")["choice"] == "aiter"


def test_a_layout_of_one_library_can_be_asked_about() -> None:
    asked = ("--model", "deepseek-v3.2", "--op", "index_topk", "--dtype", "fp8", "--machine", "gfx942")
    found = answer(*asked, "--kv", "index_k_shuffled_fnuz")
    assert found["choice"] == "aiter"
    assert any("index_k_shuffled_fnuz" in reason for reason in verdict(found, "triton")["reasons"])


def test_evidence_says_where_a_backend_ran_and_where_it_was_only_compiled() -> None:
    found = answer(
        "--model", "deepseek-v3", "--machine", "gfx942", "--machine", "sm90", "--machine", "gfx1250"
    )
    evidence = [verdict(one, "triton")["evidence"] for one in found["machines"]]
    assert evidence == ["emulated", "verified", "declared"]


GOLDEN = """\
kimi-k3 at tensor parallel size 8: decode, 12 local heads, 3 query tokens a sequence, with lse
queries bf16, cache fp8_e4m3fnuz in pages of 64, widths 512 + 64
on gfx942 (MI300X), assumed with the newest release of every package


 backend   verdict   heads                  why
 ───────────────────────────────────────────────────────────────────────────────────────────────────────────
 hopper    refuses   12 → 64 (5.33× work)   · not built yet
                                            · arch got gfx942; needs sm90
                                            · kv_format got fp8_e4m3fnuz; needs bf16
                                            → would pass on sm90, with kv_format bf16, once it is built
 aiter     refuses   12                     · aiter 0.1.20.post1 has no kernel for bf16 × fp8, 12 heads, lse
                                            → would pass without lse or more than one query token a sequence
 triton    accepts   12
 cpu       refuses   12                     · arch got gfx942; needs cpu
                                            → would pass on cpu

choice: triton (executed on an emulator of gfx942, not on hardware; 32 rows × 16 keys, 4 warps, 2 stages)
"""


def test_a_person_reads_reasons_padding_quirks_and_the_nearest_change() -> None:
    words = "explain --model kimi-k3 --tp 8 --machine gfx942 --kv fp8 --q-len 3 --lse"
    text = run(*words.split()).stdout
    assert "\n".join(line.rstrip() for line in text.splitlines()) + "\n" == GOLDEN


def test_a_person_gets_a_table_over_machines() -> None:
    lines = run(
        "explain", "--model", "glm-5", "--machine", "all", "--sparse", "--kv", "fp8"
    ).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split() and line.split()[0] in ARCHES}
    assert list(rows) == list(ARCHES)
    assert rows["cpu"].split()[-2:] == ["accepts", "cpu"]
    assert rows["sm80"].split()[-2:] == ["triton", "32×32"]
    assert "fp8_e4m3fnuz" in rows["gfx942"]


def test_extras_to_install_survive_the_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Machine("cpu", (("torch", "2.13.0"),))
    monkeypatch.setattr(import_module("anymla.cli.explain"), "this_machine", lambda: bare)
    assert "pip install 'anymla[triton]'" in run("explain", "--model", "deepseek-v3").stdout


WRONG = [
    (
        ["--model", "gpt-2", "--machine", "sm70"],
        ["model got 'gpt-2'", "machine got 'sm70'; needs one of cpu, gfx90a"],
    ),
    (
        ["--model", "minicpm3", "--tp", "16"],
        ["tp got 16; needs a divisor of 40 heads: 1, 2, 4, 5, 8, 10, 20, 40"],
    ),
    (
        ["--model", "glm-5", "--kv", "int4", "--dtype", "int8", "--op", "encode"],
        [
            "kv got int4; needs fp8, bf16",
            "dtype got int8; needs one of fp32",
            "op got encode; needs one of decode",
        ],
    ),
    (
        ["--model", "glm-5", "--sparse", "--op", "prefill"],
        ["op got prefill; needs sparse_decode with --sparse"],
    ),
    (["--model", "glm-5", "--cached-context"], ["op got decode; needs prefill with --cached-context"]),
    (["--model", "glm-5", "--block-size", "0", "--machine", "cpu"], ["block_size got 0; needs at least 1"]),
    (["--model", "deepseek-v3", "--op", "index_topk"], ["op got index_topk; needs a model with an index"]),
]


@pytest.mark.parametrize(("arguments", "messages"), WRONG, ids=lambda value: " ".join(value)[:50])
def test_a_wrong_option_is_exit_code_2_with_every_reason(arguments: list[str], messages: list[str]) -> None:
    text = run("explain", *arguments)
    assert (text.exit_code, text.stdout) == (2, "")
    in_json = run("explain", *arguments, "--json")
    assert in_json.exit_code == 2
    error = json.loads(in_json.stdout)["error"]
    for message in messages:
        assert message in error
        assert message in text.stderr


@pytest.mark.parametrize(
    "arguments", [["explain"], ["explain", "--model"], ["explain", "--nonsense"], ["encode"]], ids=" ".join
)
def test_a_command_line_that_cannot_be_parsed_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_help_lists_every_command_and_imports_none() -> None:
    script = "import sys; from anymla.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True
    )
    for name, summary in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary.split()[0] in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_explain_never_imports_torch() -> None:
    script = "import sys; from anymla.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    words = "explain --model deepseek-v3 --machine all"
    done = subprocess.run(
        [sys.executable, "-c", script, *words.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
