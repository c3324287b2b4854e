"""Numbers of a video request: as JSON numbers, and as the texts of a form."""

import pytest
from pydantic import ValidationError

from router.dialects.openai.video_schema import VideoBody


@pytest.mark.parametrize(("given", "value"), [(7, 7), ("7", 7), ("0", 0), (None, None)])
def test_a_whole_number_is_a_number_or_its_text(given: object, value: int | None):
    body = VideoBody.model_validate({"prompt": "a cat", "seed": given, "frames": given})
    assert (body.seed, body.frames) == (value, value)


@pytest.mark.parametrize("given", ["7.5", "", "seven", "1e3", " 7", True, 7.5])
def test_another_value_is_no_whole_number(given: object):
    with pytest.raises(ValidationError):
        VideoBody.model_validate({"prompt": "a cat", "frames": given})


@pytest.mark.parametrize(("given", "value"), [(7, 7.0), (7.5, 7.5), ("7.5", 7.5), ("7", 7.0), (30, 30.0), (0, 0.0)])
def test_a_number_is_a_number_or_its_text(given: object, value: float):
    assert VideoBody.model_validate({"prompt": "a cat", "guidance": given}).guidance == value


@pytest.mark.parametrize("given", ["x", "", "nan", "inf", True, 31, -1, 10**400])
def test_another_value_is_no_number(given: object):
    with pytest.raises(ValidationError):
        VideoBody.model_validate({"prompt": "a cat", "guidance": given})
