"""What a person sees: plain lines at a pace, or one live line."""

import io

from rich.console import Console

from diloco.training.progress import LineProgress, LiveProgress, make_progress, status_line

STATUS = status_line(
    "a", 12, 2.5, 1e-3, 20_000, 50, 100,
    {"versions": [3, 4], "num_bytes": {"contributions": 1_500_000, "joins": 2_000_000}, "updates": 4, "merges": 3},
    "warm start",
)  # fmt: skip


def test_a_status_is_one_line_with_everything() -> None:
    assert STATUS == (
        "a step 12 | loss 2.500 | lr 1.00e-03 | 20,000 tokens/s | run 50% of 100 tokens | versions 3-4 | "
        "up 1.50 MB down 2.00 MB | participation 75% | warm start"
    )
    assert status_line("a", 12, 2.5, 1e-3, 20_000, 50, 100, {}) == STATUS.partition(" | versions")[0]
    part = {"versions": [-1, 4, -1, 4]}  # it holds two of four fragments
    assert status_line("a", 12, 2.5, 1e-3, 20_000, 50, 100, part).endswith("of 100 tokens | versions 4")


def test_plain_lines_keep_their_pace() -> None:
    now = [0.0]
    file = io.StringIO()
    plain = LineProgress(file, every_s=5, clock=lambda: now[0])
    for second in range(12):
        now[0] = float(second)
        if plain.is_due():
            plain.show(STATUS)
    assert len(file.getvalue().splitlines()) == 3
    plain.close()


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        plain = LineProgress(io.TextIOWrapper(full, write_through=True), every_s=5)
        plain.show(STATUS)
        plain.say("it goes on")


def test_a_terminal_gets_a_live_line_and_a_pipe_gets_plain_ones() -> None:
    file = io.StringIO()
    assert isinstance(make_progress(file, 5), LineProgress)
    now = [0.0]
    live = LiveProgress(Console(file=file, force_terminal=True, width=200), clock=lambda: now[0])
    assert live.is_due()
    live.show(STATUS)
    assert not live.is_due()
    live.say("[note]")
    live.close()
    assert "loss 2.500" in file.getvalue()
    assert "[note]" in file.getvalue()
