"""All merges by name."""

from collections.abc import Mapping

from diloco.core.choices import choice_from_dict
from diloco.core.heloco import HeLoCo
from diloco.core.merge import Mean, Merge, SenderMean
from diloco.core.radial import RadialDirectional
from diloco.core.robust import CoordinateMedian, GeometricMedian, MedianNormClip, MultiKrum, TrimmedMean

MERGES: tuple[type[Merge], ...] = (
    Mean,
    SenderMean,
    RadialDirectional,
    HeLoCo,
    CoordinateMedian,
    TrimmedMean,
    GeometricMedian,
    MultiKrum,
    MedianNormClip,
)


def merge_from_dict(values: Mapping[str, object]) -> Merge:
    """Read back `Merge.to_dict()`, e.g. `{"type": "Mean"}`. Raises ConfigError naming a typo."""
    return choice_from_dict("merge", MERGES, values)
