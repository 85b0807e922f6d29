"""Merges of several learners' outer gradients into one, a file each, and screens that refuse some before."""

from diloco.core.choices import Registry
from diloco.core.merges.clipping import MedianNormClip
from diloco.core.merges.decoding import Encoded, shard_of
from diloco.core.merges.geometric_median import GeometricMedian
from diloco.core.merges.heloco import HeLoCo
from diloco.core.merges.krum import MultiKrum
from diloco.core.merges.mean import Mean
from diloco.core.merges.medians import CoordinateMedian, TrimmedMean
from diloco.core.merges.merge import Merge, merge_into
from diloco.core.merges.radial import RadialDirectional
from diloco.core.merges.screens import SCREENS, NormOutliers, NormZScore, Screen, refused_by
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
    "merge_into",
    "refused_by",
    "shard_of",
]

MERGES: Registry[Merge] = Registry(
    "merge",
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
