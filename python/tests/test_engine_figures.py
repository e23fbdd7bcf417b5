"""Figures and verdicts of measurements with an engine, tested without an engine."""

import dataclasses
import io
import json

import pytest
from cascadekv.bench import page_cache
from cascadekv.bench.engine_process import RunResult
from cascadekv.bench.figures import Figure, FigureTable, Target
from cascadekv.bench.prompts import prompt, with_prefix
from cascadekv.bench.rounds import RunPairs, connector_share, hit_most, overhead
from cascadekv.bench.sessions import HINTS, TURN_TOKENS, turns
from cascadekv.bench.vllm import HINT_REQUESTS, HINT_REQUESTS_SHORT, read_options

IDLE = {"calls": 0, "wall_s": 0.0, "cpu_s": 0.0}


def answer(first_token_s, hit=0, tokens=(7, 8)):
    return RunResult([first_token_s], [list(tokens)], [hit], IDLE, IDLE)


def pairs(tokens=4096, hit=3968, **changes):
    slow = [answer(4.0), answer(5.0), answer(6.0)]
    fast = [answer(0.5, hit), answer(0.5, hit), answer(1.0, hit)]
    return RunPairs(f"dram/22m/{tokens}", tokens, 3968, slow, fast, **changes)


def gain(made, **options):
    return made.figures(is_short=False, **options)[-1]


def test_a_gain_is_the_median_of_its_rounds_and_met_at_its_target():
    figure = gain(pairs())
    assert (figure.name, figure.samples) == ("gain/dram/22m/4096", [8.0, 10.0, 6.0])
    assert (figure.value, figure.verdict) == (8.0, "met")
    assert figure.facts["answers_that_differ"] == 0
    assert Figure("g", "x", [5.19], target=Target(at_least=5.2)).verdict == "MISSED"
    assert Figure("o", "%", [2.1], target=Target(at_most=2.0)).verdict == "MISSED"
    assert Figure("o", "%", [-1.0, 1.9], target=Target(at_most=2.0)).verdict == "met"


def test_a_second_run_with_too_few_hits_is_invalid():
    figures = pairs(hit=3840).figures(is_short=False)
    assert [figure.verdict for figure in figures] == ["", "INVALID", "INVALID"]
    assert "3840 tokens; expected 3968" in figures[-1].faults[0]
    assert figures[-1].to_json()["is_reached"] is False


def test_a_first_run_with_hits_is_invalid():
    made = pairs()
    made.slow[1] = answer(0.5, hit=128)
    assert gain(made).verdict == "INVALID"
    assert "not cold" in gain(made).faults[0]


def test_a_baseline_has_no_target():
    assert gain(pairs(is_baseline=True)).verdict == ""


def test_different_answers_are_counted():
    made = pairs()
    made.fast[0] = answer(0.5, 3968, tokens=(7, 9))
    assert gain(made).facts["answers_that_differ"] == 1
    assert gain(made).verdict == "met"


def test_short_prompts_and_short_runs_have_no_target():
    assert gain(pairs(tokens=1024)).verdict == ""
    assert [figure.verdict for figure in pairs().figures(is_short=True)] == ["", "", ""]


def test_overhead_is_paired_by_round_and_has_no_target():
    bare = [answer(1.0), answer(2.0), answer(4.0)]
    figure = overhead("22m/4096", bare, [answer(1.01), answer(2.0), answer(4.2)])
    assert figure.samples == pytest.approx([1.0, 0.0, 5.0])
    assert (figure.value, figure.verdict) == (pytest.approx(1.0), "")
    assert overhead("22m/4096", bare, [answer(1.0, 128)] * 3).verdict == "INVALID"


def test_the_connector_share_has_a_target():
    def ours(connector_s, hit=0):
        return dataclasses.replace(answer(2.0, hit), connector_s=connector_s)

    figure = connector_share("22m/4096", [ours(0.02), ours(0.04), ours(0.4)], is_short=False)
    assert figure.samples == pytest.approx([1.0, 2.0, 20.0])
    assert figure.verdict == "met"
    assert connector_share("22m/4096", [ours(0.05)], is_short=False).verdict == "MISSED"
    assert connector_share("22m/4096", [ours(0.05)], is_short=True).verdict == ""
    assert connector_share("22m/4096", [ours(0.01, 128)], is_short=False).verdict == "INVALID"


def test_connector_statistics_take_precedence_over_call_times():
    within = IDLE | {"wall_s": 0.25, "cpu_s": 0.125}
    silent = RunResult([1.0], [[7]], [0], within, within)
    assert (silent.load_s, silent.cpu_s("save"), silent.cpu_s("load")) == (0.25, 0.125, 0.125)
    stats = {"load_seconds": 0.5, "load_cpu_seconds": 0.75}
    telling = RunResult([1.0], [[7]], [0], within, within, connector_stats=stats)
    assert (telling.load_s, telling.cpu_s("save"), telling.cpu_s("load")) == (0.5, 0.125, 0.75)


def test_a_table_has_the_common_format_and_exits_with_1_if_invalid(tmp_path):
    out = io.StringIO()
    sheet = FigureTable(out)
    sheet.begin("vLLM")
    sheet.add(Figure("gain/dram", "x", [6.0, 5.0, 7.0], target=Target(at_least=5.2)))
    sheet.add(Figure("gain/lmcache", "x", (), skipped="lmcache is not here"))
    assert sheet.end() == 0
    sheet.add(Figure("gain/files", "x", (), target=Target(at_least=5.2), faults=["it ended"]))
    assert sheet.end() == 1
    sheet.write(tmp_path / "f.json", {"cpu": "c"})
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [figure["verdict"] for figure in figures] == ["met", "skipped", "INVALID"]
    assert [figure["is_reached"] for figure in figures] == [True, None, False]
    shared = {"name", "value", "unit", "limit", "share", "samples", "limit_samples", "limit_is"}
    assert all(shared | {"target", "is_reached"} <= figure.keys() for figure in figures)
    assert (figures[0]["value"], figures[0]["target"]) == (6.0, {"at_least": 5.2})
    assert figures[1]["value"] is None
    assert json.loads((tmp_path / "f.environment.json").read_text()) == {"cpu": "c"}
    printed = out.getvalue()
    assert "1 of 1 targets met" in printed
    assert "1 of 2 targets met, 1 figures INVALID" in printed
    assert "skipped: lmcache is not here" in printed


def test_prompts_share_only_the_requested_prefix():
    one, other = prompt(512, "round", 1), prompt(512, "round", 2)
    assert one == prompt(512, "round", 1)
    assert one[:16] != other[:16]
    # Regression: prompts of different lengths shared a prefix, so that first runs had hits.
    assert one[:16] != prompt(1024, "round", 1)[:16]
    tail = with_prefix(one, 384, "tail")
    assert (len(tail), tail[:384]) == (512, one[:384])
    assert tail[384] != one[384]
    assert [hit_most(tokens, 128) for tokens in (127, 128, 129, 256, 257)] == [0, 0, 128, 128, 256]


def test_files_are_cold_after_their_pages_were_dropped(tmp_path):
    (tmp_path / "segment").write_bytes(b"x" * 3_000_000)
    (tmp_path / "empty").touch()
    warm = page_cache.cached_bytes(tmp_path)
    left = page_cache.drop(tmp_path)
    if left == warm:
        pytest.skip("this file system keeps its pages in memory")
    assert (warm, left) == (3_002_368, 0)


def test_the_arguments_of_the_command_are_parsed():
    line = "--models 22m --prompts 1024,4096 --rounds 5 --from dram --beside none --directory d"
    args = read_options(line.split())
    assert (args.models, args.rounds, args.short) == ("22m", 5, False)
    with pytest.raises(SystemExit):
        read_options(["--models", "22m"])


@pytest.mark.parametrize("count", [HINT_REQUESTS_SHORT, HINT_REQUESTS])
def test_synthetic_sessions_repeat_prefixes_and_vary_each_hint(count):
    requests = list(turns(count, seed=1))
    assert [turn.tokens for turn in requests] == [turn.tokens for turn in turns(count, seed=1)]
    said = set()
    again = []
    for turn in requests:
        again += [turn] * (tuple(turn.tokens[:-TURN_TOKENS]) in said)
        said.add(tuple(turn.tokens))
    assert any(turn.is_important for turn in again)
    for hint in HINTS.values():
        assert len({str(hint(turn)) for turn in requests}) == 2
