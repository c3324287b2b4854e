"""Render the Homebrew formula for a release: `python -m deploy.formula VERSION URL SHA256 > macpool.rb`.

In the formula, uv creates an environment with a separate Python below the formula's folder, because Homebrew cannot
build MLX's wheels as resources. The formula has no service, because `brew services` starts a user agent, and macOS does
not allow user agents to use the local network. The formula's caveats name `cluster service install` instead.
"""

import re
import sys
from collections.abc import Sequence

FORMULA = """class Macpool < Formula
  desc "One OpenAI-compatible endpoint over the Macs of a household or a lab"
  homepage "{homepage}"
  url "{url}"
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on "uv"
  depends_on arch: :arm64
  depends_on macos: :sonoma

  def install
    system "uv", "venv", "--managed-python", "--python", "3.12", libexec
    system "uv", "pip", "install", "--python", libexec/"bin/python", "#{{buildpath}}[node]"
    bin.install_symlink libexec/"bin/cluster"
    generate_completions_from_executable(bin/"cluster", "completion", shells: [:bash, :zsh, :fish])
  end

  def caveats
    <<~TEXT
      cluster up            creates a pool; cluster join joins one
      cluster doctor        lists problems and their solutions
      To start macpool with the machine, as a system service:
        sudo #{{opt_bin}}/cluster service install
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/cluster version")
    assert_match "0 failed", shell_output("#{{bin}}/cluster doctor --state #{{testpath}}", 0)
  end
end
"""
"""Template of the formula, for `str.format`."""


def render_formula(version: str, url: str, sha256: str) -> str:
    """Return the formula of a release, as Ruby source.

    `url` is the HTTPS address of the source archive, `sha256` its digest in hex digits. Raise `ValueError` for an
    invalid version, URL or digest.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:[a-z0-9.+-]*)", version):
        raise ValueError(f"{version!r} is not a version")
    if not re.fullmatch(r"https://[\w.-]+/[\w./%+-]+\.tar\.gz", url):
        raise ValueError(f"{url!r} is not the address of an archive (https://….tar.gz)")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"{sha256!r} is not a SHA-256")
    homepage = "/".join(url.split("/")[:5])
    return FORMULA.format(homepage=homepage, url=url, version=version, sha256=sha256)


def main(arguments: Sequence[str]) -> int:
    """Print the formula for the arguments VERSION, URL and SHA256. Return 0, or 2 for invalid arguments."""
    if len(arguments) != 3:
        print("usage: python -m deploy.formula VERSION URL SHA256", file=sys.stderr)
        return 2
    try:
        print(render_formula(*arguments), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
