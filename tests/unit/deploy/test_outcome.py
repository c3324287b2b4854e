"""Tools of the Mac check: their output, their failures, and the sizes that they print."""

import pytest

from deploy.outcome import ToolError, is_near, parse_number, parse_size, run_tool
from wire.units import GIB, KIB, MIB


def test_a_tool_that_fails_or_is_missing_is_named():
    assert run_tool("echo", "a b") == "a b\n"
    with pytest.raises(ToolError, match=r"^sh -c echo no >&2; exit 3: exit 3: no$"):
        run_tool("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(ToolError, match=r"^/nonexistent/tool: .*No such file"):
        run_tool("/nonexistent/tool")


@pytest.mark.parametrize(
    ("text", "size"), [("1034 MB", 1034 * MIB), ("1.5G", GIB * 3 // 2), ("12K", 12 * KIB), ("7 B", 7), ("0", 0)]
)
def test_every_unit_is_a_power_of_1024(text: str, size: int):
    assert parse_size(f"x: 1 GB\nFootprint: {text}\n", "Footprint") == size


def test_output_without_the_number_is_an_error_with_the_output():
    assert parse_number("a\nsize 12\n", r"^size (\d+)$") == 12
    with pytest.raises(ToolError, match="is not in the output: 'other'"):
        parse_number("other\n", r"^size (\d+)$")
    with pytest.raises(ToolError, match="'Footprint' is not in the output: 'other'"):
        parse_size("other\n", "Footprint")


def test_sizes_are_near_within_a_share_of_the_larger_one():
    assert is_near(90, 100, 0.1)
    assert is_near(100, 90, 0.1)
    assert not is_near(89, 100, 0.1)
