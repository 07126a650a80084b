"""How the launcher shows what ranks write: whole lines with their rank, however the bytes arrive."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.launcher import frames
from ronde.launcher.output import Output


class Target:
    """A stream without a file descriptor, as in a notebook."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def shown(monkeypatch: pytest.MonkeyPatch, chunks: list[tuple[int, int, bytes]]) -> tuple[str, str, int]:
    """(stdout, stderr, bytes given back as credit)"""
    out, err = Target(), Target()
    credit: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        output = Output(lambda _rank, amount: credit.append(amount))
        for chunk in chunks:
            output.add(*chunk)
        assert output.close(lambda: 10.0)
    return out.text, err.text, sum(credit)


def test_lines_are_whole_and_go_to_their_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [(0, 0, b"a"), (1, 0, b"b\nc"), (0, 1, b"e\n"), (0, 0, b"A\n"), (1, 0, b"C\n")]
    out, err, credit = shown(monkeypatch, chunks)
    assert out == "[1]<stdout>:b\n[0]<stdout>:aA\n[1]<stdout>:cC\n"
    assert err == "[0]<stderr>:e\n"
    assert credit == sum(len(data) for _, _, data in chunks)


@pytest.mark.parametrize("ended", [True, False])
def test_half_lines_show_at_the_end(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    chunks = [(2, 0, b"half")] + ([(2, 0, b"")] if ended else [])
    assert shown(monkeypatch, chunks)[0] == "[2]<stdout>:half\n"


def test_a_progress_bar_is_redrawn_in_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [(0, 1, b"\r10%"), (0, 1, b"\r20%"), (0, 1, b"\r30%\n"), (0, 1, b"")]
    assert shown(monkeypatch, chunks)[1] == "[0]<stderr>:10%\r[0]<stderr>:20%\r[0]<stderr>:30%\n"


def test_crlf_is_one_line_end_even_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, [(0, 0, b"a\r"), (0, 0, b"\nb\r\n"), (0, 0, b"")])[0] == "[0]<stdout>:a\n[0]<stdout>:b\n"


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_the_pieces_do_not_matter(data: bytes, sizes: list[int]) -> None:
    # Bytes of few kinds, so that line ends are often cut.
    data = bytes(b"ab\r\n"[byte % 4] for byte in data)
    pieces, at = [], 0
    for size in sizes * 40:
        pieces.append((0, 0, data[at : at + size]))
        at += size
        if at >= len(data):
            break
    end = [(0, 0, b"")]
    with pytest.MonkeyPatch.context() as monkeypatch:
        whole = shown(monkeypatch, [(0, 0, data), *end] if data else end)
        cut = shown(monkeypatch, [piece for piece in pieces if piece[2]] + end)
    assert cut == whole


def test_an_endless_line_is_broken_and_nothing_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, credit = shown(monkeypatch, [(0, 0, b"x" * (1 << 20))] * 20)
    assert out.count("x") == credit == 20 << 20
    assert max(len(line) for line in out.splitlines()) < 10 << 20


def test_a_target_that_fails_takes_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Target):
        def write(self, text: str) -> None:
            raise RuntimeError("closed")

    credit: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        output = Output(lambda _rank, amount: credit.append(amount))
        output.add(0, 0, b"lost\n")
        output.add(0, 0, b"lost too\n")
        assert output.close(lambda: 10.0)
    assert credit == [5, 9]


def test_files_hold_each_stream_as_it_was(tmp_path: Path) -> None:
    output = Output(lambda _rank, _amount: None, str(tmp_path / "new" / "place"), ranks=2)
    output.add(1, 0, b"a\rb")
    output.add(1, 1, b"\xff\n")
    assert output.close(lambda: 10.0)
    files = {str(p.relative_to(tmp_path / "new" / "place")): p.read_bytes() for p in tmp_path.rglob("std*")}
    assert files == {"rank.0/stdout": b"", "rank.0/stderr": b"", "rank.1/stdout": b"a\rb", "rank.1/stderr": b"\xff\n"}


def test_closing_waits_for_a_reader_as_long_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    data = b"x" * (1 << 20)
    for patience in (0.3, 30.0):
        read_end, write_end = os.pipe()
        link = tmp_path / "rank.0" / "stdout"
        link.unlink(missing_ok=True)
        link.symlink_to(f"/proc/self/fd/{write_end}")
        output = Output(lambda _rank, _amount: None, str(tmp_path), ranks=1)
        os.close(write_end)
        output.add(0, 0, data)
        received: list[int] = []

        def read(read_end: int = read_end, received: list[int] = received) -> None:
            time.sleep(1.0)
            while piece := os.read(read_end, 65536):
                received.append(len(piece))

        reader = threading.Thread(target=read)
        reader.start()
        assert output.close(lambda patience=patience: patience) == (patience > 1)
        reader.join(20)
        os.close(read_end)
        assert sum(received) == len(data)


def test_a_full_disk_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    err = Target()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", err)
        (tmp_path / "rank.0").mkdir()
        (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
        output = Output(lambda _rank, _amount: None, str(tmp_path), ranks=1)
        output.add(0, 0, b"a\n")
        output.add(0, 0, b"b\n")
        assert output.close(lambda: 10.0)
    assert err.text.count("\n") == 1 and "rank.0/stdout: No space left" in err.text


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 31), st.integers(0, 1), st.binary(max_size=30))), st.integers(1, 20))
def test_frames_arrive_whole_in_any_pieces(outputs: list[tuple[int, int, bytes]], size: int) -> None:
    sent: list[object] = []
    wire = b""
    for rank, stream, data in outputs:
        wire += frames.output(rank, stream, data) + frames.control({"rank": rank, "text": "\udcff"})
        sent += [("o", (rank, stream, data)), ("j", {"rank": rank, "text": "\udcff"})]
    parser = frames.Parser()
    assert [frame for at in range(0, len(wire), size) for frame in parser.feed(wire[at : at + size])] == sent


@pytest.mark.parametrize("data", [b"x\0\0\0\1a", b"j\xff\xff\xff\xff", b"o\0\0\0\1a", b"j\0\0\0\1{"])
def test_malformed_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(frames.Parser().feed(data))
