"""How the outer gradients of several learners become one: a file per merge, and all merges by name."""

from collections.abc import Mapping

from diloco.core.choices import choice_from_dict
from diloco.core.merges.clipping import MedianNormClip
from diloco.core.merges.geometric_median import GeometricMedian
from diloco.core.merges.heloco import HeLoCo
from diloco.core.merges.inputs import Encoded, encoded_of, shard_of
from diloco.core.merges.krum import MultiKrum
from diloco.core.merges.mean import Mean
from diloco.core.merges.medians import CoordinateMedian, TrimmedMean
from diloco.core.merges.merge import Merge, merged_runs, merged_vector
from diloco.core.merges.radial import RadialDirectional
from diloco.core.merges.screens import SCREENS, NormOutliers, NormZScore, Screen, refused_by, screen_from_dict
from diloco.core.merges.sender_mean import SenderMean

__all__ = [
    "MERGES",
    "SCREENS",
    "CoordinateMedian",
    "Encoded",
    "GeometricMedian",
    "HeLoCo",
    "Mean",
    "MedianNormClip",
    "Merge",
    "MultiKrum",
    "NormOutliers",
    "NormZScore",
    "RadialDirectional",
    "Screen",
    "SenderMean",
    "TrimmedMean",
    "encoded_of",
    "merge_from_dict",
    "merged_vector",
    "merged_runs",
    "refused_by",
    "screen_from_dict",
    "shard_of",
]

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
