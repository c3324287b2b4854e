"""Identity of two models: by content where both have a hash, by samples otherwise."""

import pytest

from wire.models.version import UNKNOWN_VERSION, ModelVersion, VersionGrade


@pytest.mark.parametrize(
    ("one", "other", "grade"),
    [
        (ModelVersion("f", "c"), ModelVersion("f", "c"), VersionGrade.CONTENT),
        (ModelVersion("f", "c"), ModelVersion("g", "c"), VersionGrade.CONTENT),
        (ModelVersion("f", "c"), ModelVersion("f", "d"), VersionGrade.DIFFERS),
        (ModelVersion("f", "c"), ModelVersion("f", ""), VersionGrade.SAMPLED),
        (ModelVersion("f", "c"), ModelVersion("g", ""), VersionGrade.DIFFERS),
        (ModelVersion("f"), ModelVersion("f"), VersionGrade.SAMPLED),
        (ModelVersion("f"), UNKNOWN_VERSION, VersionGrade.DIFFERS),
        (UNKNOWN_VERSION, UNKNOWN_VERSION, VersionGrade.SAMPLED),
    ],
)
def test_versions_are_compared_by_content_only_if_both_have_a_hash(
    one: ModelVersion, other: ModelVersion, grade: VersionGrade
):
    assert (one.compare(other), other.compare(one)) == (grade, grade)
    assert one.is_same(other) is (grade is not VersionGrade.DIFFERS)
