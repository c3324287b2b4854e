#!/bin/sh
# Installs macpool for this user, with a Python of its own, by uv. Changes nothing but what `uv tool` does.
set -eu

usage() {
    cat <<'TEXT'
usage: sh install.sh [--from SOURCE] [--video] [--coordinator-only] [--python VERSION] [--dry-run]

  --from SOURCE        a wheel or a folder with the source [the folder that this script came with]
  --video              with Ray, for machines that lend memory to videos
  --coordinator-only   without MLX: this machine only coordinates
  --python VERSION     3.11 to 3.14 [3.12]; the same on all machines where videos are made
  --dry-run            print what would be run
TEXT
}

fail() {
    printf '%s\n' "install.sh: $1" >&2
    exit "${2:-1}"
}

run() {
    if [ "$dry" = yes ]; then
        printf '%s\n' "$*"
    else
        "$@"
    fi
}

source_of='' extras=node python=3.12 dry=no
while [ $# -gt 0 ]; do
    case $1 in
        --from) [ $# -ge 2 ] || fail "--from needs a value" 2; source_of=$2; shift ;;
        --python) [ $# -ge 2 ] || fail "--python needs a value" 2; python=$2; shift ;;
        --video) extras=node,video ;;
        --coordinator-only) extras='' ;;
        --dry-run) dry=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option: $1" 2 ;;
    esac
    shift
done

case $python in
    3.11 | 3.12 | 3.13 | 3.14 | 3.11.* | 3.12.* | 3.13.* | 3.14.*) ;;
    *) fail "macpool runs on Python 3.11 to 3.14, not $python" 2 ;;
esac
[ "$(id -u)" -ne 0 ] || fail "run it as the user who will run macpool, without sudo" 6

case $(uname -s) in
    Darwin)
        # uname says x86_64 in a shell that Rosetta translates; sysctl knows the machine.
        [ "$(sysctl -n hw.optional.arm64 2>/dev/null || echo 0)" = 1 ] || [ -z "$extras" ] ||
            fail "nodes need Apple silicon; --coordinator-only works here"
        major=$(sw_vers -productVersion | cut -d. -f1)
        [ "$major" -ge 14 ] || fail "nodes need macOS 14 or newer, this is $(sw_vers -productVersion)"
        ;;
    Linux) ;;
    *) fail "macpool runs on macOS and Linux" ;;
esac

command -v uv >/dev/null 2>&1 ||
    fail "uv is not installed: \`brew install uv\`, or see its manual; then run this again" 5

# Never a bare name: an index would give whatever somebody published under it.
if [ -z "$source_of" ]; then
    source_of=$(cd "$(dirname "$0")/.." && pwd)
    [ -f "$source_of/deploy/install.sh" ] && [ -f "$source_of/pyproject.toml" ] ||
        fail "this script stands alone: say with --from which wheel or folder to install" 2
fi

requirement=$source_of
if [ -n "$extras" ]; then
    requirement="${source_of}[${extras}]"
fi
# A Python of uv's own: the system's is replaced under us by updates, and the firewall knows programs by their path.
run uv tool install --force --managed-python --python "$python" "$requirement"
run uv tool update-shell

if [ "$dry" = no ]; then
    cat <<'TEXT'

Next, in a new terminal:
  cluster up                           make a pool here
  cluster join URL --token-file FILE   or join one; `cluster up` prints the line
  cluster doctor                       see whether anything is in the way
  sudo "$(which cluster)" service install     start it with the machine
TEXT
fi
