"""Traces of lengths and arrivals: Azure and BurstGPT."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtape.traces.importers.events import EventMaker
from support.imports import column, imported, public_trace, read, refused, result_of

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,0"
)
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_seven_digits_crlf_and_no_final_newline(tmp_path: Path) -> None:
    with imported(tmp_path, AZURE) as log:
        assert result_of(log).format == "azure"
        assert column(log, "SELECT at_ns FROM events WHERE op = 'prompt'") == [0, 4_314_579_000]
        assert log.default_run().started_at_ns == 1_700_158_546_680_590_000
        assert column(log, "SELECT completion_tokens FROM events WHERE op = 'generate'") == [44, 0]
        assert column(log, "SELECT count(*) FROM tokens") == [0]
        assert [w.kind for w in result_of(log).warnings] == ["no_time_zone"]


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ("16.11.2023 18:15", "no wall-clock time"),
        ("2023-13-16 18:15:46", "no date"),
        ("2023-11-16 18:15:99", "99 seconds"),
        ("1901-11-16 18:15:46", "before 1970"),
        ("", "no wall-clock time"),
    ],
)
def test_a_bad_stamp_is_named(tmp_path: Path, stamp: str, words: str) -> None:
    error = refused(tmp_path, AZURE + f"\r\n{stamp},1,1\r\n")
    assert (error.line, error.field) == (4, "TIMESTAMP")
    assert words in str(error)


def test_zones_are_honoured(tmp_path: Path) -> None:
    head, first, _ = AZURE.split("\r\n")
    data = f"{head}\n2023-11-16 18:15:46.68059Z,1,1\n2023-11-16T19:15:46.68059+01:00,2,2\n{first}"
    assert {r.at_ns for r in read(tmp_path, data).records} == {1_700_158_546_680_590_000}


@pytest.mark.parametrize("cell", ["1.0", "-1", "", "nan", "1e3", "0x10", "١", str(2**64)])
def test_a_count_is_a_whole_number(tmp_path: Path, cell: str) -> None:
    error = refused(tmp_path, AZURE + f"\r\n2023-11-16 18:15:46,{cell},1")
    assert (error.line, error.field) == (4, "ContextTokens")


def test_a_row_of_another_width_is_named(tmp_path: Path) -> None:
    error = refused(tmp_path, AZURE + "\r\n2023-11-16 18:15:46,1")
    assert (error.line, "2 cells, the header has 3" in str(error)) == (4, True)


def test_columns_are_found_by_name_and_time_begins_at_0(tmp_path: Path) -> None:
    rows = "19440110.0,abc,43,GPT-4,906,446,1352,Conversation log\n19440161.5,,,ChatGPT,36,29,65,API log\n"
    with imported(tmp_path, BURST_3 + rows + "19440161.5,,,ChatGPT,36,29,65,API log\n") as log:
        prompts = log.sql(
            """SELECT session_id, at_ns, p.n_tokens, detail->>'type', model_name FROM events p
               JOIN sessions USING (run_id, session_id) WHERE op = 'prompt' ORDER BY at_ns, session_id"""
        )[1]
        assert prompts == [
            ("abc", 0, 906, "Conversation log", "GPT-4"),
            ("line-0000003", 51_500_000_000, 36, "API log", "ChatGPT"),
            ("line-0000004", 51_500_000_000, 36, "API log", "ChatGPT"),
        ]
        assert column(log, "SELECT elapsed_ns FROM events WHERE op = 'generate'") == [43 * 10**9, None, None]
        assert result_of(log).duplicates == 1


def test_one_session_of_two_models(tmp_path: Path) -> None:
    rows = "1,s,1,GPT-4,9,4,13,Conversation log\n2,s,1,ChatGPT,8,3,11,Conversation log\n"
    found = read(tmp_path, BURST_3 + rows)
    maker = EventMaker("r", "burstgpt", 0, bytes(32), content=False)
    for record, session in zip(found.records, found.sessions, strict=True):
        maker.add(record, session)
    list(maker.closing())
    assert [s["model_name"] for s in maker.sessions] == ["GPT-4"]
    assert [e["turn"] for e in maker.events] == [0, 1, 1, 2, 2, 2]
    assert [e["detail"] for e in maker.events if e["op"] == "prompt"] == [
        '{"line":2,"type":"Conversation log"}',
        '{"line":3,"type":"Conversation log","model":"ChatGPT"}',
    ]


def test_a_failure_is_kept_and_counted(tmp_path: Path) -> None:
    found = read(tmp_path, BURST_1 + "5,ChatGPT,472,18,490,API log\n6,ChatGPT,472,0,472,API log\n")
    assert [r.output_tokens for r in found.records] == [18, 0]
    (warned,) = found.warnings
    assert (warned.kind, warned.count, warned.line) == ("zero_output", 1, 3)


@pytest.mark.parametrize("cell", ["nan", "inf", "-5", "later", "-inf"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, cell: str) -> None:
    error = refused(tmp_path, BURST_1 + f"{cell},ChatGPT,1,1,2,API log\n")
    assert (error.line, error.field) == (2, "Timestamp")


def test_minus_zero_is_zero(tmp_path: Path) -> None:
    assert read(tmp_path, BURST_1 + "-0.0,ChatGPT,1,1,2,API log\n").records[0].at_ns == 0


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (BURST_1.replace("Response tokens", "Answer"), "Response tokens"),
        (BURST_1.replace("Log Type", "Model"), "Model"),
    ],
)
def test_a_missing_or_repeated_column_is_named(tmp_path: Path, header: str, field: str) -> None:
    error = refused(tmp_path, header + "5,ChatGPT,472,18,490,API log\n", format_name="burstgpt")
    assert error.field == field


def test_a_span_of_months_is_a_warning(tmp_path: Path) -> None:
    with imported(tmp_path, BURST_1 + "5,ChatGPT,1,1,2,API log\n19440110,ChatGPT,1,1,2,API log\n") as log:
        assert [w.kind for w in result_of(log).warnings] == ["span_long"]


@pytest.mark.parametrize(
    ("name", "rows", "span_s"),
    [
        ("azure/AzureLLMInferenceTrace_conv.csv", 19_366, 3501.721937),
        ("burstgpt/BurstGPT_1.head3.csv", 3, 113.0),
        ("burstgpt/BurstGPT_3.head4.csv", 4, 144.0),
    ],
)
def test_the_public_files(tmp_path: Path, name: str, rows: int, span_s: float) -> None:
    found = read(tmp_path, [public_trace(name)])
    times = [r.at_ns for r in found.records]
    assert (len(times), (max(times) - min(times)) / 1e9) == (rows, span_s)


def test_vidur_with_and_without_arrivals(tmp_path: Path) -> None:
    data = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n"
    found = read(tmp_path, data)
    assert (found.format, [r.at_ns for r in found.records]) == ("vidur", [0, 4_314_579_000])
    data = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,5,15,2.0\n20,5,24,4.0\n"
    found = read(tmp_path, data)
    assert [(r.at_ns, r.input_tokens, r.output_tokens) for r in found.records] == [(0, 10, 5), (0, 20, 5)]
    assert found.kinds == ["no_times", "total_differs"]


@pytest.mark.parametrize("cell", ["-5", "10.5", "nan", ""])
def test_vidur_takes_no_prompt_of_a_negative_or_broken_length(tmp_path: Path, cell: str) -> None:
    error = refused(tmp_path, f"num_prefill_tokens,num_decode_tokens\n10,1\n{cell},5\n")
    assert (error.line, error.field) == (3, "num_prefill_tokens")


def test_the_public_vidur_file_is_the_azure_file(tmp_path: Path) -> None:
    azure = read(tmp_path, [public_trace("azure/AzureLLMInferenceTrace_conv.csv")]).records
    vidur = read(tmp_path, [public_trace("vidur/splitwise_conv.csv")]).records
    zero = azure[0].at_ns
    assert [(r.input_tokens, r.output_tokens) for r in azure] == [(r.input_tokens, r.output_tokens) for r in vidur]
    assert all(abs(a.at_ns - zero - v.at_ns) <= 1 for a, v in zip(azure, vidur, strict=True))
    lengths = read(tmp_path, [public_trace("vidur/arxiv_summarization_head500.csv")])
    assert (len(lengths.records), lengths.kinds) == (500, ["no_times"])
