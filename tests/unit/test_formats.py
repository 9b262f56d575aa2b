import pytest

from forge.formats import duration, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.41234, "0.412"),
        (12.345, "12.3"),
        (999.6, "1,000"),
        (1240.4, "1,240"),
        (3.1e-5, "3.1e-05"),
        (-0.5, "-0.5"),
        (-12345.6, "-12,346"),
        (2e8, "2.0e+08"),
    ],
)
def test_numbers_read_as_a_person_writes_them(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (3.24, "3.2 s"), (59.94, "59.9 s"), (59.96, "1:00"), (84, "1:24"), (3723, "1:02:03"), (-1, "0.0 s")],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text
