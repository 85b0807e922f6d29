"""The site file: read with units, errors that name site and key, learners, network and outages that follow, a dump that
reads back."""

import itertools
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.planning.site import (
    BudgetTable,
    FaultsTable,
    FaultTable,
    LinkTable,
    Outage,
    Site,
    SiteSyncerTable,
    SiteTable,
    load_site,
    parse_site,
)
from diloco.planning.units import TIME
from diloco.planning.workload import ModelSizeTable
from diloco.tables import Table

ROOT = Path(__file__).parents[2]
TABLES: dict[str, type[Table]] = {
    "model": ModelSizeTable,
    "budget": BudgetTable,
    "site": SiteTable,
    "link": LinkTable,
    "syncer": SiteSyncerTable,
    "faults": FaultsTable,
    "fault": FaultTable,
}

TWO = """
[[site]]
name = "berlin"
accelerators = 8
step_time = "310 ms"
jitter_percent = 5
up = "100 Mbit/s"
down = "1 Gbit/s"
latency = "20 ms"
price_up = "0.09 USD/GB"
shares = "dc-1"

[[site]]
name = "homes"
learners = 2
step_time = "2 s"
up = "10 Mbit/s"
down = "50 Mbit/s"

[[link]]
name = "dc-1"
up = "40 Mbit/s"
down = "1 Gbit/s"
"""
ONE = '[[site]]\nname = "a"\nstep_time = "1 s"\nup = "1 Mbit/s"\ndown = "1 Mbit/s"\n'


def test_learners_follow_from_the_sites_in_base_units() -> None:
    berlin, *homes = parse_site(TWO).learners()
    assert (berlin.name, berlin.place.name, berlin.place.accelerators, berlin.step_s) == ("berlin", "berlin", 8, 0.31)
    assert (berlin.place.up, berlin.place.down, berlin.place.latency) == (1e8, 1e9, 0.02)
    assert (berlin.place.jitter_percent, berlin.place.shares) == (5, ("dc-1",))
    assert [home.name for home in homes] == ["homes-0", "homes-1"]
    assert homes[0]._replace(name="homes-1") == homes[1]


def test_a_step_time_follows_from_speed_and_utilization() -> None:
    text = ONE.replace('step_time = "1 s"', 'accelerators = 4\nspeed = "300 TFLOP/s"\nutilization = 0.5') + (
        "[model]\nparameters = 1e9\nlayers = 24\n[budget]\ntokens = 1e9\ntokens_per_step = 1e6\n"
    )
    assert parse_site(text).learners()[0].step_s == pytest.approx(6e9 * 1e6 / (4 * 1.5e14))
    sparse = text.replace("layers = 24", "layers = 24\nactive_parameters = 1e8")
    assert parse_site(sparse).learners()[0].step_s == pytest.approx(6e8 * 1e6 / (4 * 1.5e14))
    two = text.replace('name = "a"', 'name = "a"\nlearners = 2')
    assert parse_site(two).learners()[1].step_s == pytest.approx(6e9 * 0.5e6 / (4 * 1.5e14))


def test_the_network_joins_own_links_shared_links_and_the_syncers() -> None:
    site = parse_site(TWO + '[syncer]\nup = "45 Mbit/s"\ndown = "1 Gbit/s"\nshards = 2\n')
    network = site.network()
    network.send(0.0, 0, "up", 5e6)  # 40 Mbit of the shared link's 40 Mbit/s, below its own 100
    network.send(0.0, 0, "down", 45e6 / 8)
    network.send(0.0, 1, "down", 5e6 / 8 * 45)  # at half of the two shards' 90 Mbit/s until the other's is through
    up, down, far = sorted(network.arrived(1e9), key=lambda done: done.arrived_s)
    assert (up.learner, up.direction, up.arrived_s) == (0, "up", pytest.approx(1.02))
    assert (down.learner, down.arrived_s) == (0, pytest.approx(1.02))
    assert far.arrived_s == pytest.approx(1.0 + (225 - 45) / 50)


def test_step_times_scatter_around_their_mean_and_depend_on_nothing_but_who_when_and_seed() -> None:
    berlin, home, _ = parse_site(TWO).learners()
    drawn = [berlin.step_seconds(step) for step in range(2000)]
    assert statistics.fmean(drawn) == pytest.approx(0.31, rel=0.005)  # 0.05 / √2000 is 0.0011
    assert statistics.stdev(drawn) == pytest.approx(0.31 * 0.05, rel=0.05)
    assert [berlin.step_seconds(step) for step in reversed(range(5))] == drawn[4::-1]
    assert berlin.step_seconds(7, seed=1) != drawn[7]
    assert home.step_seconds(3) == 2.0


def test_steps_may_vary_by_more_than_their_mean() -> None:
    """As `diloco plan measure` finds them on a machine that does other things: one step of a hundred takes as long as
    all others."""
    berlin = parse_site(TWO.replace("jitter_percent = 5", "jitter_percent = 300")).learners()[0]
    assert berlin.place.jitter_percent == 300
    assert statistics.fmean(berlin.step_seconds(step) for step in range(20_000)) == pytest.approx(0.31, rel=0.2)


def test_the_model_comes_by_preset_by_numbers_or_by_config(tmp_path: Path) -> None:
    config = tmp_path / "tiny" / "config.json"
    config.parent.mkdir()
    config.write_text('{"model_type": "gpt2", "vocab_size": 10, "n_positions": 4, "n_embd": 2, "n_layer": 3}')
    by_config = parse_site(ONE + f'[model]\nconfig = "{config}"\n').workload()
    assert (by_config.name, by_config.num_layers, by_config.num_parameters) == ("tiny", 3, (10 + 4) * 2 + 3 * 74 + 4)
    assert parse_site(ONE + '[model]\npreset = "10b"\n').workload().num_parameters == 1e10
    assert parse_site(ONE + "[model]\nparameters = 5e6\nlayers = 7\n").workload().num_layers == 7
    with pytest.raises(ConfigError, match="has no model; add"):
        parse_site(ONE).workload()


# ------------------------------------------------------------------------------------------------------------ outages


def test_a_trace_names_learners_or_whole_sites() -> None:
    site = parse_site(
        TWO + '[[fault]]\nlearner = "homes"\nat = "30 min"\nback = "40 min"\n'
        '[[fault]]\nlearner = "berlin"\nat = "10 s"\n[[fault]]\nlearner = "homes-1"\nat = "1 h"\n'
    )
    assert site.outages(3600.0) == [Outage(0, 10.0, None), Outage(1, 1800.0, 2400.0), Outage(2, 1800.0, 2400.0)]
    assert site.outages(3601.0)[-1] == Outage(2, 3600.0, None)


def test_random_outages_are_seeded_exponential_and_each_learners_own() -> None:
    text = ONE + '[faults]\nmtbf = "10 min"\nrepair = "1 min"\nseed = 3\n'
    site = parse_site(text)
    outages = site.outages(1e6)
    assert outages == parse_site(text).outages(1e6)
    assert outages != parse_site(text.replace("seed = 3", "seed = 4")).outages(1e6)
    assert all(outage.back_s == outage.at_s + 60 for outage in outages)
    ran = [after.at_s - (before.back_s or math.nan) for before, after in itertools.pairwise(outages)]
    assert min(ran) > 0
    assert statistics.fmean(ran) == pytest.approx(600, rel=0.1)  # 1500 of them: a standard error of 2.6 %
    assert statistics.stdev(ran) == pytest.approx(600, rel=0.1)
    more = parse_site(text + ONE.replace('"a"', '"b"')).outages(1e6)
    assert [outage for outage in more if outage.learner == 0] == outages
    assert site.outages(5e5) == [outage for outage in outages if outage.at_s < 5e5]


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", 'site file: "site" is missing; add it'),
        (
            "[[site]",
            (
                "site file is not TOML: Expected ']]' at the end of an array declaration (at line 1, column 7); "
                "correct that line"
            ),
        ),
        (ONE.replace("up", "upp"), 'site file: unknown key "site.a.upp"; did you mean "up"?'),
        (ONE.replace('"1 s"', "0.3"), '[site.a.step_time] 0.3 has no unit; write for example "0.3 ms"'),
        (
            ONE.replace('up = "1 M', 'up = "-1 M'),
            '[site.a.up] "-1 Mbit/s" has to be above 0; write for example "100 Mbit/s"',
        ),
        (
            ONE.replace('up = "1 Mbit/s"', 'up = "1 Mbps"'),
            '[site.a.up] "1 Mbps": unknown unit "Mbps" of a rate; did you mean "Mbit/s"?',
        ),
        (ONE.replace('name = "a"\n', ""), 'site file: "site.1.name" is missing; add it'),
        (
            ONE.replace('step_time = "1 s"\n', ""),
            "give either the measured step_time, or speed and utilization",
        ),
        (ONE + "speed = '1 TFLOP/s'\n", "[site.a] speed and utilization belong together"),
        (ONE + "learners = 0\n", "site.a.learners = 0: input should be greater than or equal to 1"),
        (ONE + ONE, "there are two learners a; rename one"),
        (
            ONE + 'shares = "dc"\n[[link]]\nname = "dc-1"\nup = "1 Mbit/s"\ndown = "1 Mbit/s"\n',
            'site a shares the link "dc", which has no [[link]]; did you mean "dc-1"?',
        ),
        (ONE + "[modle]\nlayers = 3\n", 'site file: unknown key "modle"; did you mean "model"?'),
        (
            ONE + "[model]\nlayers = 3\n",
            "[model] a model has a preset, parameters and layers, or a config; give one of the three",
        ),
        (
            ONE + '[model]\npreset = "1B"\n',
            '[model] there is no model preset "1B"; known are 100b, 10b, 1b, deepseek-v3, llama-405b',
        ),
        (ONE + '[[fault]]\nlearner = "b"\nat = "1 s"\n', 'a [[fault]] names the learner "b"; known are a'),
        (ONE + '[[fault]]\nlearner = "a"\nat = "9 s"\nback = "5 s"\n', "[fault.1] back at 5 s is not after at = 9 s"),
        (
            ONE + '[[fault]]\nlearner = "a"\nat = "1 s"\n[[fault]]\nlearner = "a"\nat = "9 s"\n',
            "a fails at 9 s while it is absent; remove that [[fault]]",
        ),
        (
            ONE + '[faults]\nmtbf = "1 h"\nrepair = "1 s"\n[[fault]]\nlearner = "a"\nat = "9 s"\n',
            "[faults] and [[fault]] exclude each other; keep one of them",
        ),
        (
            ONE.replace('step_time = "1 s"', 'speed = "1 TFLOP/s"\nutilization = 0.5'),
            "site a gives speed and utilization; its step time requires [model] and [budget]",
        ),
    ],
)
def test_bad_input_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site(text)
    assert str(caught.value).endswith(sentence)
    assert "\n" not in str(caught.value)


def test_reading_a_site_file_needs_no_torch() -> None:
    code = "import sys, diloco.planning.site; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ documentation


@pytest.mark.parametrize("name", Site.model_fields)
def test_the_page_lists_every_key_with_its_default_and_no_other(name: str) -> None:
    annotation = str(Site.model_fields[name].annotation)
    heading = f"### [[{name}]]" if annotation.startswith("tuple") else f"### [{name}]"
    section = (ROOT / "docs" / "adviser.md").read_text().split(heading + "\n")[1].split("\n##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    table = TABLES[name]
    assert [row[0].strip("`") for row in rows] == list(table.model_fields)
    for (key, _, shown, _), field in zip(rows, table.model_fields.values(), strict=True):
        if field.is_required():
            assert shown == "required", key
        elif field.default is None:
            assert shown == "—", key
        elif shown.startswith('`"'):
            assert TIME.parse(shown.strip('`"')) == field.default, key
        else:
            assert shown.strip("`") == str(list(field.default) if field.default == () else field.default), key


def test_the_example_is_a_site_file() -> None:
    assert load_site(ROOT / "examples" / "site.toml").names == ["berlin", "oregon", "lab-0", "lab-1"]


def test_windows_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TWO.replace("\n", "\r\n").encode())
    assert load_site(path) == parse_site(TWO)
