import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.doctor import macos_tool_output
from coordinator.doctor.macos_tool_output import Reachability, find_responsible_program, is_blocked


def test_the_version_of_the_system():
    assert macos_tool_output.parse_version("ProductName: macOS\nProductVersion: 15.5\nBuildVersion: 24F74\n") == (
        "15.5",
        "24F74",
    )
    assert macos_tool_output.parse_version("") == ("", "")


def test_power_settings_are_read_without_their_comments():
    text = "Currently in use:\n sleep                1 (sleep prevented by caffeinate)\n womp 1\n hibernatemode 3\n"
    assert macos_tool_output.parse_power_settings(text) == {"sleep": 1, "womp": 1, "hibernatemode": 3}


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("Firewall is enabled. (State = 1)", True),
        ("Firewall is blocking all non-essential incoming connections. (State = 2)", True),
        ("Firewall is disabled. (State = 0)", False),
        ("", None),
    ],
)
def test_the_firewall(text: str, on: bool | None):
    assert macos_tool_output.parse_firewall(text) is on


@pytest.mark.parametrize(
    ("text", "all_blocked"),
    [
        ("Firewall has block all state set to enabled.", True),
        ("Block all ENABLED!", True),
        ("Firewall is set to block all non-essential incoming connections", True),
        ("Firewall has block all state set to disabled.", False),
        ("Block all DISABLED!", False),
        ("", None),
    ],
)
def test_parse_block_all_detects_the_state(text: str, all_blocked: bool | None):
    assert macos_tool_output.parse_block_all(text) is all_blocked


LISTED = """Total number of apps = 2

1 : /opt/homebrew/bin/python3.12
             (Allow incoming connections)
2 : /opt/uv/python3.11
             (Block incoming connections)
"""


def test_a_program_in_the_firewalls_list():
    assert macos_tool_output.parse_blocked(LISTED, "/opt/uv/python3.11") is True
    assert macos_tool_output.parse_blocked(LISTED, "/opt/homebrew/bin/python3.12") is False
    assert macos_tool_output.parse_blocked(LISTED, "/opt/other") is None
    assert macos_tool_output.parse_blocked(LISTED, "/opt/uv/python3.1") is None, "a prefix is another program"
    spaced = "1 :  /opt/uv: a/python3.11 \n  \t ( Block incoming connections )\n"
    assert macos_tool_output.parse_blocked(spaced, "/opt/uv: a/python3.11") is True


def test_filevault_and_lid():
    assert macos_tool_output.parse_filevault("FileVault is On.\n") is True
    assert macos_tool_output.parse_filevault("FileVault is Off.\n") is False
    assert macos_tool_output.parse_filevault("Error") is None
    assert macos_tool_output.parse_lid('  "AppleClamshellState" = Yes') is True
    assert macos_tool_output.parse_lid('  "AppleClamshellState" = No') is False
    assert macos_tool_output.parse_lid("") is None


@pytest.mark.parametrize(
    ("gateway", "others", "blocked"),
    [
        (0, (("a", 65),), True),
        (61, (("a", 65), ("b", 65)), True),
        (0, (("a", 65), ("b", 61)), False),  # another host of the same network is reached
        (65, (("a", 65),), False),  # no network at all
        (None, (("a", 65),), False),
        (-1, (("a", 65),), False),
        (0, (("a", -1),), False),
        (0, (), False),
    ],
)
def test_is_blocked_distinguishes_privacy_from_a_network_failure(gateway: int | None, others: tuple, blocked: bool):
    assert is_blocked(Reachability(gateway, others)) is blocked


@pytest.mark.parametrize(
    ("environ", "who", "exempt"),
    [
        ({"TERM_PROGRAM": "Apple_Terminal"}, "Terminal", True),
        ({"SSH_CONNECTION": "1 2 3 4"}, "the SSH session", True),
        ({"TERM_PROGRAM": "vscode"}, "Visual Studio Code", False),
        ({"TERM_PROGRAM": "tmux"}, "tmux", False),
        ({"XPC_SERVICE_NAME": "org.macpool"}, "the launchd job org.macpool", False),
        ({"XPC_SERVICE_NAME": "0", "TERM_PROGRAM": "iTerm.app"}, "iTerm", False),
        ({"XPC_SERVICE_NAME": "", "TERM_PROGRAM": "WarpTerminal"}, "Warp", False),
        ({"SSH_CONNECTION": "1 2 3 4", "TERM_PROGRAM": "tmux"}, "the SSH session", True),
        ({"TERM_PROGRAM": "ghostty"}, "ghostty", False),
        ({}, "the program that started this", False),
    ],
)
def test_find_responsible_program_by_environment(environ: dict[str, str], who: str, exempt: bool):
    assert find_responsible_program(environ) == who
    assert macos_tool_output.is_exempt(environ) is exempt


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ('panic(cpu 7 caller 0x1): "completeMemory() prepare count underflow" @IOGPUMemory.cpp:550\nDebugger', True),
        ('{"panicString":"panic(cpu 7 caller 0x1): \\"prepare count underflow\\" @X.cpp:5\\nOS version"}', True),
        ("panic(cpu 7 caller 0x1): watchdog timeout\nloaded kexts:\ncom.apple.iokit.IOGPUFamily 130.13", False),
        ("panic(cpu 1 caller 0x1): hardwired rewired wiredness", False),
        ("no panic of ours: completeMemory()", False),
        ("", False),
    ],
)
def test_a_panic_is_the_gpus_by_its_message_alone(report: str, found: bool):
    message, gpu = macos_tool_output.parse_panic(report)
    assert gpu is found
    assert "\\" not in message
    assert message or "panic(cpu" not in report


def test_parse_panic_shortens_a_message_after_its_words_are_read():
    text = "x" * 119
    report = f"panic(cpu 0 caller 0x1): {text} completeMemory() of IOGPU"
    assert macos_tool_output.parse_panic(report) == (f"{text} ", True)


@given(st.text(max_size=200))
def test_no_text_breaks_a_reader(text: str):
    for read in (
        macos_tool_output.parse_version,
        macos_tool_output.parse_power_settings,
        macos_tool_output.parse_firewall,
        macos_tool_output.parse_block_all,
        macos_tool_output.parse_filevault,
        macos_tool_output.parse_lid,
        macos_tool_output.parse_gateway,
        macos_tool_output.parse_panic,
    ):
        read(text)
    macos_tool_output.parse_blocked(text, "python")
    macos_tool_output.parse_neighbours(text, None)


def test_parse_neighbours_omits_gateway_broadcast_and_multicast():
    listing = "".join(
        f"? ({address}) at {at} on en0\n"
        for address, at in (
            ("192.168.1.1", "a4:b1"),
            ("192.168.1.7", "a4:b2"),
            ("192.168.1.8", "(incomplete)"),
            ("192.168.1.255", "ff:ff"),
            ("223.0.0.1", "a4:b3"),
            ("224.0.0.251", "1:0"),
        )
    )
    assert macos_tool_output.parse_neighbours(listing, "192.168.1.1") == ["192.168.1.7", "223.0.0.1"]
