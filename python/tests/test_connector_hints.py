"""Hints of requests are parsed, and invalid hints are ignored."""

import difflib
import random

import pytest
from cascadekv.connectors.hints import (
    PARAMETERS,
    UNKNOWN_MAX,
    finish_hints,
    given_hints,
    request_hints,
    session_name,
)
from cascadekv.hints import Hints, Priority, StopReason


def test_every_parameter_is_read():
    hints, complaints = request_hints(
        {
            "cascade.session": "s",
            "cascade.ends_session": True,
            "cascade.priority": "high",
            "cascade.stop": "tool_use",
            "cascade.workload": 3,
            "cascade.expected_within": 30,
            "do_remote_prefill": False,
        }
    )
    assert not complaints
    assert hints == Hints(
        ends_session=True,
        priority=Priority.HIGH,
        stop=StopReason.TOOL_USE,
        workload=3,
        expected_within=30.0,
    )


def test_no_parameters_are_no_hints():
    for params in (None, {}, {"cascade.stop": None}, {"do_remote_decode": 1, 7: 8}):
        assert request_hints(params) == (Hints(), [])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cascade.session", 7, "text of 1 to 256 characters"),
        ("cascade.session", "", "text of 1 to 256 characters"),
        ("cascade.session", "s" * 257, "text of 1 to 256 characters"),
        ("cascade.ends_session", 1, "true or false"),
        ("cascade.priority", "urgent", "one of low, normal, high"),
        ("cascade.priority", ["high"], "one of low, normal, high"),
        ("cascade.stop", "stop", "one of tool_use"),
        ("cascade.workload", 256, "from 0 to 255"),
        ("cascade.workload", True, "from 0 to 255"),
        ("cascade.workload", 1.0, "from 0 to 255"),
        ("cascade.expected_within", -1, "a number of seconds from 0 to 3600"),
        ("cascade.expected_within", float("nan"), "a number of seconds from 0 to 3600"),
        ("cascade.expected_within", 10**400, "a number of seconds from 0 to 3600"),
        ("cascade.expected_within", "5", "a number of seconds from 0 to 3600"),
    ],
)
def test_an_invalid_value_is_ignored_with_a_warning(name, value, expected):
    hints, complaints = request_hints({name: value})
    assert hints == Hints()
    assert [name in text and expected in text for text in complaints] == [True]


def test_an_unknown_parameter_gets_a_suggestion():
    hints, complaints = request_hints({"cascade.sessions": "s", "cascade.workload": 1})
    assert hints.workload == 1
    assert complaints == ["'cascade.sessions': no such parameter; did you mean cascade.session?"]


def test_unknown_parameters_cost_little_however_many_they_are(monkeypatch):
    # Regression: each got a warning and a search for a similar name, in the scheduler's thread.
    searched = []
    search = difflib.get_close_matches

    def recorded(name, known, n):
        searched.append(name)
        return search(name, known, n)

    monkeypatch.setattr(difflib, "get_close_matches", recorded)
    unknown = {f"cascade.{number}" + "x" * 100_000: 1 for number in range(200)}
    hints, complaints = request_hints(unknown | {"cascade.workload": 1})
    assert hints.workload == 1
    assert len(complaints) == len(searched) == UNKNOWN_MAX
    assert all(len(name) <= 60 for name in searched)


def test_valid_parameters_are_named():
    given = {"cascade.stop": "length", "cascade.workload": 999, "cascade.session": None, "other": 1}
    assert given_hints(given) == ["stop"]
    for nothing in (None, {}, [], "text"):
        assert given_hints(nothing) == []


def test_arbitrary_parameters_never_raise():
    chance = random.Random(3)
    values = [
        None,
        0,
        -1,
        10**400,
        1.5,
        float("inf"),
        "",
        "x" * 10_000,
        b"x",
        [],
        {},
        object(),
        True,
        10**9999,
    ]
    names = [*PARAMETERS, "cascade.", "cascade.x" * 99, "other", 5, None, b"cascade.stop"]
    for _ in range(2000):
        params = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(6))}
        hints, complaints = request_hints(params, priority=chance.randint(-5, 5))
        assert isinstance(hints, Hints)
        assert all(len(text) < 400 for text in complaints)
        session_name(params)
    for params in ([], 7, "text", [("cascade.stop", "length")]):
        assert request_hints(params)[0] == Hints()
        assert session_name(params) is None


@pytest.mark.parametrize(
    ("engine", "given", "result"),
    [
        (0, None, Priority.NORMAL),
        (-3, None, Priority.HIGH),
        (9, None, Priority.LOW),
        (9, "high", Priority.HIGH),
        (-3, "normal", Priority.NORMAL),
    ],
)
def test_the_callers_priority_takes_precedence(engine, given, result):
    params = {} if given is None else {"cascade.priority": given}
    assert request_hints(params, priority=engine)[0].priority is result


@pytest.mark.parametrize(
    ("status", "stop_reason", "stop"),
    [
        ("FINISHED_STOPPED", None, StopReason.END_TURN),
        ("FINISHED_STOPPED", 151645, StopReason.END_TURN),
        ("FINISHED_LENGTH_CAPPED", None, StopReason.LENGTH),
        ("FINISHED_REPETITION", None, StopReason.LENGTH),
        ("FINISHED_ABORTED", None, StopReason.CANCELLED),
        ("FINISHED_ABORTED", "</s>", StopReason.END_TURN),
        ("FINISHED_IGNORED", None, None),
        ("FINISHED_ERROR", None, None),
        ("A_STATUS_OF_TOMORROW", None, None),
    ],
)
def test_the_end_of_a_request_becomes_a_hint(status, stop_reason, stop):
    hints = Hints(workload=2)
    assert finish_hints(hints, status_name=status, stop_reason=stop_reason) == Hints(
        workload=2, stop=stop
    )
    given = Hints(stop=StopReason.TOOL_USE)
    assert finish_hints(given, status_name=status, stop_reason=stop_reason) == given


def test_session_names_are_stable_digests():
    name = session_name({"cascade.session": "alice@example.org"})
    assert name == session_name(None, engine_session="alice@example.org")
    assert name == session_name({"cascade.session": "alice@example.org"}, engine_session="x")
    assert len(name) == 16
    assert b"alice" not in name
    assert session_name({"cascade.session": 7}, engine_session="x") == session_name(
        None, engine_session="x"
    )
    assert session_name({}) is None
    assert session_name({"cascade.session": "\ud800"}) is not None
