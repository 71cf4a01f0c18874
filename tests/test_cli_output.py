"""Output: to terminals in colour and folded, to files and pipes plain, and never what could steer a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipcast.cli.output import (
    exact_bytes,
    mebibytes,
    prepare_streams,
    printable,
    progress_bar,
    shorten,
    write,
    write_facts,
    write_heading,
    write_json,
    write_table,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Calls a function with a terminal of 60 columns as standard output; returns what it writes."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(function):
        with contextlib.redirect_stdout(Terminal()) as stream:
            function()
        return stream.getvalue()

    return call


def show_everything():
    write_heading("heading")
    write_table(("name", "bytes"), [("a", "1"), ("bb", "22")], right=("bytes",))


def test_a_terminal_gets_colour(on_terminal):
    heading, header, *rows = on_terminal(show_everything).splitlines()
    assert heading == "\x1b[1mheading\x1b[0m"
    assert "\x1b[1m" in header
    assert rows == ["  a         1", "  bb       22"]


@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_is_not_forced_on_anybody(on_terminal, monkeypatch, variable):
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert "\x1b" not in on_terminal(show_everything)


def test_an_empty_no_color_means_nothing(on_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in on_terminal(show_everything)


def test_a_pipe_gets_plain_text_with_a_line_for_each_row(capsys):
    long = "x" * 300
    write_table(("name", "bytes"), [("a [b] :smile: c", "1"), (long, "22")], right=("bytes",))
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "bytes"]
    assert first.split("  ")[1] == "a [b] :smile: c"
    assert second == f"  {long}     22"


def test_a_table_is_folded_to_the_width_of_a_terminal(on_terminal):
    lines = on_terminal(lambda: write_table(("name", "reason"), [("a", "word " * 40)])).splitlines()
    assert len(lines) > 4
    assert max(len(line) for line in lines[1:]) <= 60


def test_facts_stand_in_two_columns_and_empty_ones_are_left_out(capsys):
    write_facts([("a", "1"), ("much", ["2", "3"]), ("none", []), ("nothing", ())])
    assert capsys.readouterr().out.splitlines() == ["  a        1", "  much     2", "           3"]


HOSTILE = "\x1b]0;owned\x07\r\x08\x9b31m\u202eevil\udcff\ttab"


def show_hostile():
    write(HOSTILE)
    write_heading(HOSTILE)
    write_table(("name",), [(HOSTILE,)])
    write_facts([("name", HOSTILE)])


def test_names_can_not_steer_a_terminal(on_terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = on_terminal(show_hostile).replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert not any(letter in shown for letter in "\x1b\x07\r\x08\x9b\u202e\udcff\t")
    assert shown.count("\\x1b]0;owned\\x07\\r\\x08\\x9b31m\\u202eevil\\udcff\\ttab") == 4


@given(st.text())
def test_printable_text_stays_and_the_rest_is_escaped(text):
    shown = printable(text)
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    if all(letter.isprintable() or letter == "\n" for letter in text):
        assert shown == text


def test_json_is_ascii_and_reads_back(capsys):
    value = {"name": HOSTILE, "é": [1, None, 2.5]}
    write_json(value)
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == value


def test_what_an_encoding_lacks_becomes_an_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    prepare_streams()
    write("30 × fp8")
    assert raw.getvalue().split() == [b"30", b"\\xd7", b"fp8"]


def test_there_is_no_bar_without_a_terminal(capfd):
    with progress_bar("loading") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_on_standard_error(monkeypatch, capsys):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("loading [b]it[/b]") as progress:
        progress(1 << 20, 2 << 20)
    assert "loading [b]it[/b]" in stream.getvalue()
    assert "2.0 MiB" in stream.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "short"), [("short", "short"), ("one two, three", "one two…"), ("x" * 20, "x" * 11 + "…")]
)
def test_long_texts_are_cut_at_a_space(text, short):
    assert shorten(text, 12) == short


def test_sizes():
    assert mebibytes(6_173_702_528) == "5,887.7"
    assert exact_bytes(6_173_702_528) == "6,173,702,528 bytes"


def test_discarded_output_goes_nowhere(tmp_path):
    # in a process of its own, whose standard output it closes
    import subprocess

    program = "from slipcast.cli.output import discard_output, write; discard_output(); write('unseen')"
    file = tmp_path / "out"
    with file.open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, env=os.environ)
    assert file.read_bytes() == b""
