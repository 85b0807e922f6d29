"""The printed tables of the papers: bandwidths in Gbit/s for a compute utilisation of 50, 80, 90, 95 and 99 %."""

from typing import NamedTuple

TARGETS = (50, 80, 90, 95, 99)

MODELS = {"1B ": "1b", "10B ": "10b", "100B ": "100b", "Llama 405B ": "llama-405b", "DeepSeek-V3 ": "deepseek-v3"}
"""By the beginning of a title."""
OPTIONS = {"H": "sync_every", "tau": "overlap"}
"""Short names of options in the tables."""


class Row(NamedTuple):
    """A line of a table, and the options that make it."""

    title: str
    convention: str
    model: str
    method: str
    options: dict[str, int | str]
    cells: tuple[str, ...]


def _rows(convention: str, text: str) -> list[Row]:
    rows = []
    for line in text.strip().splitlines():
        title, method, options, cells = (part.strip() for part in line.split("|"))
        model = next(model for start, model in MODELS.items() if title.startswith(start))
        pairs = (option.split("=") for option in options.split())
        values: dict[str, int | str] = {
            OPTIONS.get(key, key): int(value) if value.isdecimal() else value for key, value in pairs
        }
        rows.append(Row(title, convention, model, method, values, tuple(cells.split())))
    return rows


TABLE_4 = _rows(
    "streaming-diloco",
    """
    1B data parallel                             | data-parallel |                     | 86.8 152.6 184.2 222.3 569.0
    1B DiLoCo, H = 100                           | diloco        | H=100               | 1.4 6.2 13.3 23.3 86.8
    1B Streaming, H = 100                        | streaming     | H=100               | 1.4 5.2 9.1 16.0 28.1
    1B Streaming, overlap of one inner step      | streaming     | H=100 tau=1         | 1.4 4.3 6.2 9.1 11.0
    1B Streaming, overlap, FP4                   | streaming     | H=100 tau=1 up=e3m0 | 0.4 0.9 1.7 2.0 3.0
    10B data parallel                            | data-parallel |                     | 104.8 222.3 222.3 268.3 471.5
    10B DiLoCo, H = 100                          | diloco        | H=100               | 1.7 7.5 16.0 33.9 104.8
    10B Streaming, H = 100                       | streaming     | H=100               | 1.7 5.2 9.1 13.3 19.3
    10B Streaming, overlap of one inner step     | streaming     | H=100 tau=1         | 1.7 3.6 5.2 6.2 7.5
    10B Streaming, overlap, FP4                  | streaming     | H=100 tau=1 up=e3m0 | 0.4 0.9 1.4 1.4 1.7
    100B data parallel                           | data-parallel |                     | 184.2 323.8 390.7 390.7 471.5
    100B DiLoCo, H = 100                         | diloco        | H=100               | 3.0 11.0 23.3 49.4 184.2
    100B Streaming, H = 100                      | streaming     | H=100               | 2.4 6.2 9.1 11.0 19.3
    100B Streaming, overlap of one inner step    | streaming     | H=100 tau=1         | 1.7 3.6 4.3 5.2 5.2
    100B Streaming, overlap, FP4                 | streaming     | H=100 tau=1 up=e3m0 | 0.5 0.9 1.1 1.1 1.4
""",
)
"""arXiv 2501.18512, table 4: all of it."""

TABLE_5 = _rows(
    "streaming-diloco",
    """
    1B overlap of one inner step, FP4, H = 30    | streaming     | H=30 tau=1 up=e3m0  | 2.4 3.6 4.3 4.3 4.3
    1B overlap of one outer step, FP4, H = 30    | eager         | H=30 up=e3m0        | 1.1 2.0 2.0 2.0 2.4
    1B overlap of one outer step, FP4, H = 100   | eager         | H=100 up=e3m0       | 0.1 0.2 0.2 0.2 0.2
    10B overlap of one inner step, FP4, H = 30   | streaming     | H=30 tau=1 up=e3m0  | 1.4 2.4 2.4 3.0 3.0
    10B overlap of one outer step, FP4, H = 30   | eager         | H=30 up=e3m0        | 0.7 1.1 1.4 1.4 1.4
    10B overlap of one outer step, FP4, H = 100  | eager         | H=100 up=e3m0       | 0.1 0.2 0.2 0.3 0.3
    100B overlap of one inner step, FP4, H = 30  | streaming     | H=30 tau=1 up=e3m0  | 0.9 1.7 2.0 2.0 2.0
    100B overlap of one outer step, FP4, H = 30  | eager         | H=30 up=e3m0        | 0.5 0.8 0.9 0.9 0.9
    100B overlap of one outer step, FP4, H = 100 | eager         | H=100 up=e3m0       | 0.2 0.3 0.3 0.3 0.4
""",
)
"""arXiv 2502.12996, table 5, without its nine rows that repeat table 4."""

TABLE_6 = _rows(
    "scaling-laws",
    """
    10B data parallel                            | data-parallel |                     | 104.8 184.2 222.3 222.3 390.7
    10B DiLoCo, H = 10                           | diloco        | H=10                | 16.0 49.4 86.8 152.6 222.3
    10B DiLoCo, H = 50                           | diloco        | H=50                | 3.0 11.0 23.3 41.0 126.5
    10B DiLoCo, H = 100                          | diloco        | H=100               | 1.4 6.2 13.3 23.3 86.8
    10B DiLoCo, H = 300                          | diloco        | H=300               | 0.5 2.0 4.3 9.1 41.0
    Llama 405B data parallel                     | data-parallel |                     | 126.5 222.3 268.3 323.8 323.8
    Llama 405B DiLoCo, H = 10                    | diloco        | H=10                | 19.3 72.0 126.5 184.2 268.3
    Llama 405B DiLoCo, H = 50                    | diloco        | H=50                | 3.6 13.3 28.1 59.6 184.2
    Llama 405B DiLoCo, H = 100                   | diloco        | H=100               | 2.0 7.5 16.0 33.9 126.5
    Llama 405B DiLoCo, H = 300                   | diloco        | H=300               | 0.7 3.0 6.2 13.3 59.6
    DeepSeek-V3 data parallel                    | data-parallel |                     | 323.8 569.0 686.6 686.6 1000.0+
    DeepSeek-V3 DiLoCo, H = 10                   | diloco        | H=10                | 49.4 152.6 268.3 390.7 686.6
    DeepSeek-V3 DiLoCo, H = 50                   | diloco        | H=50                | 7.5 33.9 72.0 126.5 390.7
    DeepSeek-V3 DiLoCo, H = 100                  | diloco        | H=100               | 4.3 16.0 41.0 72.0 268.3
    DeepSeek-V3 DiLoCo, H = 300                  | diloco        | H=300               | 1.7 6.2 13.3 28.1 126.5
""",
)
"""arXiv 2503.09799, table 6, without its rows of DiLoCo at H = 1, which repeat data parallel."""
