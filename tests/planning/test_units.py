"""Quantities: read with their units only, printed so that they read back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.planning.units import COMPUTE, PRICE_PER_BYTE, PRICE_PER_S, RATE, SIZE, TIME, Quantity

QUANTITIES = [RATE, TIME, SIZE, COMPUTE, PRICE_PER_BYTE, PRICE_PER_S]


@pytest.mark.parametrize(("quantity", "text", "value"), [
    (RATE, "100 Mbit/s", 1e8),
    (RATE, "1e3Mbit/s", 1e9),
    (RATE, "12.5 MB/s", 1e8),
    (RATE, "1 MiB/s", 8 * 2**20),
    (RATE, " 10_000   bit/s ", 1e4),
    (RATE, "0 bit/s", 0.0),
    (TIME, "50 ms", 0.05),
    (TIME, "24 h", 86400.0),
    (TIME, ".5 s", 0.5),
    (TIME, "5. s", 5.0),
    (TIME, "1 year", 31557600.0),
    (SIZE, "3.5e9 bytes", 3.5e9),
    (SIZE, "2 GiB", 2**31),
    (COMPUTE, "312 TFLOP/s", 3.12e14),
    (PRICE_PER_BYTE, "0.09 USD/GB", 9e-11),
    (PRICE_PER_S, "7.2 USD/h", 0.002),
])  # fmt: skip
def test_read_in_the_base_unit(quantity: Quantity, text: str, value: float) -> None:
    assert quantity.parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("quantity", "text", "sentence"), [
    (RATE, "100", '"100" has no unit; write for example "100 Mbit/s"'),
    (RATE, 100, '100 has no unit; write for example "100 Mbit/s"'),
    (RATE, 2.5, '2.5 has no unit; write for example "2.5 Mbit/s"'),
    (RATE, "", '"" is not a rate; write a number and its unit, for example "100 Mbit/s"'),
    (RATE, "fast", '"fast" is not a rate; write a number and its unit, for example "100 Mbit/s"'),
    (RATE, True, 'true is not a rate; write a number and its unit, for example "100 Mbit/s"'),
    (RATE, None, 'null is not a rate; write a number and its unit, for example "100 Mbit/s"'),
    (RATE, "100 Mb/s", '"100 Mb/s": unknown unit "Mb/s" of a rate; did you mean "Mbit/s"?'),
    (RATE, "100 mbit/s", '"100 mbit/s": unknown unit "mbit/s" of a rate; did you mean "Mbit/s"?'),
    (RATE, "100 Mbps", '"100 Mbps": unknown unit "Mbps" of a rate; did you mean "Mbit/s"?'),
    (TIME, "5 minutes", '"5 minutes": unknown unit "minutes" of a time; did you mean "min"?'),
    (TIME, "-5 ms", '"-5 ms" has to be 0 or more; write for example "50 ms"'),
    (TIME, "inf s", '"inf s" is not a time; write a number and its unit, for example "50 ms"'),
    (TIME, "nan s", '"nan s" is not a time; write a number and its unit, for example "50 ms"'),
    (TIME, "1e40 s", '"1e40 s" is out of range; write for example "50 ms"'),
    (TIME, "1e-40 s", '"1e-40 s" is out of range; write for example "50 ms"'),
    (RATE, "1e308 Gbit/s", '"1e308 Gbit/s" is out of range; write for example "100 Mbit/s"'),
    (TIME, "1e999 s", '"1e999 s" is out of range; write for example "50 ms"'),
])  # fmt: skip
def test_anything_else_is_one_sentence(quantity: Quantity, text: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quantity.parse(text)
    assert str(caught.value) == sentence


def test_the_key_is_named_and_zero_may_be_refused() -> None:
    with pytest.raises(ConfigError, match=r'^site\.up = "0 bit/s" has to be above 0; write for example "100 Mbit/s"$'):
        RATE.parse("0 bit/s", "site.up", positive=True)


@pytest.mark.parametrize(("quantity", "value", "text"), [
    (RATE, 1e8, "100 Mbit/s"),
    (RATE, 999.96e6, "1 Gbit/s"),
    (RATE, 0.0, "0 bit/s"),
    (RATE, 12.0, "12 bit/s"),
    (RATE, 5.4321e15, "5432 Tbit/s"),
    (TIME, 0.05, "50 ms"),
    (TIME, 90.0, "1.5 min"),
    (TIME, 65.0, "65 s"),
    (TIME, 157.74, "158 s"),
    (TIME, 600.0, "10 min"),
    (TIME, 3720.0, "62 min"),
    (TIME, 7200.0, "2 h"),
    (TIME, 1e5, "27.8 h"),
    (TIME, 31557600.0, "365 d"),
    (TIME, 1e-9, "0.001 us"),
    (TIME, 0.0, "0 s"),
    (TIME, math.inf, "inf"),
    (SIZE, 441e12, "441 TB"),
    (PRICE_PER_BYTE, 9e-11, "0.09 USD/GB"),
])  # fmt: skip
def test_printed_in_the_fitting_unit(quantity: Quantity, value: float, text: str) -> None:
    assert quantity.show(value) == text


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.example)
@given(value=st.floats(min_value=1e-12, max_value=1e18))
def test_what_is_printed_reads_back_to_the_digits_shown(quantity: Quantity, value: float) -> None:
    read = quantity.parse(quantity.show(value, digits=5))
    assert read == pytest.approx(value, rel=5e-5)
