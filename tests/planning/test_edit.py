"""A measurement goes into a site file and leaves the rest of its text alone."""

import pytest

from diloco.errors import ConfigError
from diloco.planning.site import parse_site, with_measurement

FILE = """\
# our two rooms
[[site]]
name = "cellar"   # the cold one
speed = "100 TFLOP/s"
utilization = 0.4
  up = "20 Mbit/s" # contract says 50
down = "100 Mbit/s"

# upstairs, four of the same
[[site]]
name = "attic"
learners = 4
step_time = "1 s"
up = '1 Gbit/s'
down = "1 Gbit/s"

[budget]
tokens = 1e9
tokens_per_step = 1e5
[model]
preset = "1b"
"""
LINK = {"up": "47.2 Mbit/s", "down": "93 Mbit/s", "latency": "8.1 ms"}
STEP = {"step_time": "310 ms", "jitter_percent": 2.5}


def test_values_change_in_place_comments_stay_and_new_keys_are_added() -> None:
    text = with_measurement(FILE, "site.toml", "cellar", STEP | LINK, {"budget": {}})
    assert text == FILE.replace('"20 Mbit/s" # contract says 50', '"47.2 Mbit/s" # contract says 50').replace(
        'speed = "100 TFLOP/s"\nutilization = 0.4\n', ""
    ).replace(
        'down = "100 Mbit/s"\n', 'down = "93 Mbit/s"\nstep_time = "310 ms"\njitter_percent = 2.5\nlatency = "8.1 ms"\n'
    )
    assert with_measurement(text, "site.toml", "cellar", STEP | LINK, {}) == text


def test_a_learner_of_several_stands_for_its_site() -> None:
    text = with_measurement(FILE, "site.toml", "attic-2", {"up": "900 Mbit/s"}, {})
    assert text == FILE.replace("up = '1 Gbit/s'", 'up = "900 Mbit/s"')


def test_a_new_site_comes_after_the_others() -> None:
    text = with_measurement(FILE, "site.toml", "garage", STEP | LINK, {})
    assert [place.name for place in parse_site(text).site] == ["cellar", "attic", "garage"]
    assert text.index("garage") < text.index("[budget]")
    assert parse_site(text).site[:2] == parse_site(FILE).site


def test_a_new_site_leaves_the_comment_of_the_table_after_it_where_it_is() -> None:
    text = with_measurement(FILE.replace("[budget]", "# a week\n[budget]"), "site.toml", "garage", STEP | LINK, {})
    assert "\n\n# a week\n[budget]\n" in text
    assert parse_site(text).site[-1].name == "garage"


SITE = 'name = "far"\nstep_time = "1 s"\nup = "1 Mbit/s"\ndown = "1 Mbit/s"\n'
INLINE = """\
site = [{name = "cellar", speed = "1 TFLOP/s", utilization = 0.4, up = "1 Mbit/s", down = "1 Mbit/s"}]
model = {preset = "1b"}
budget = {tokens = 1e9, tokens_per_step = 1e5}
"""


@pytest.mark.parametrize(
    "text",
    [
        FILE.replace('"20 Mbit/s" #', '"""\n20 Mbit/s""" #'),
        FILE.replace("[budget]", f'[[fault]]\nlearner = "attic"\nat = "1 h"\n[[site]]\n{SITE}[budget]'),
        INLINE,
    ],
)
def test_other_ways_to_write_a_file_are_extended_too(text: str) -> None:
    before, after = parse_site(text), parse_site(with_measurement(text, "site.toml", "cellar", STEP | LINK, {}))
    assert after.site[0].up == 47.2e6
    assert after.model_copy(update={"site": before.site}) == before
    assert after.site[1:] == before.site[1:]


def test_a_new_file_has_the_defaults() -> None:
    text = with_measurement("", "site.toml", "a", STEP | LINK, {"model": {"parameters": 1000, "layers": 2}})
    site = parse_site(text)
    assert text.startswith("[model]\nparameters = 1000\n")
    assert site.workload().num_layers == 2
    assert site.learners()[0].place.latency == pytest.approx(0.0081)


@pytest.mark.parametrize(
    ("text", "measured", "words"),
    [
        ("[[site]", LINK, "site.toml is not TOML"),
        (FILE, {"up": "0 bit/s"}, "has to be above 0"),
        ("", STEP, r'"site.new.up" is missing; add it'),
        (
            'site = [{name = "old", step_time = "1 s", up = "1 Mbit/s", down = "1 Mbit/s"}]',
            STEP | LINK,
            "form that cannot be extended",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, measured: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        with_measurement(text, "site.toml", "new", measured, {})
    assert "\n" not in str(caught.value)
