#!/bin/sh
# Installs macpool for this user, with a separate Python, by uv. Makes only the changes of `uv tool`.
set -eu

usage() {
    cat <<'TEXT'
usage: sh install.sh [--from SOURCE] [--video] [--coordinator-only] [--python VERSION] [--dry-run]

  --from SOURCE        a wheel or a folder with the source [the folder of this script]
  --video              with Ray, for machines that lend memory to videos
  --coordinator-only   without MLX: this machine is only a coordinator
  --python VERSION     3.11 to 3.14 [3.12]; the same on all machines that make videos
  --dry-run            print the commands without running them
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

case $source_of in
    '' | . | .. | */* | *.whl) ;;
    *) fail "--from $source_of could be a foreign package of that name: write ./$source_of" 2 ;;
esac
case $python in
    3.11 | 3.12 | 3.13 | 3.14 | 3.11.* | 3.12.* | 3.13.* | 3.14.*) ;;
    *) fail "macpool runs on Python 3.11 to 3.14, not $python" 2 ;;
esac
[ "$(id -u)" -ne 0 ] || fail "run it as the user who will run macpool, without sudo" 6

case $(uname -s) in
    Darwin)
        # In a shell under Rosetta uname reports x86_64; sysctl reports the machine.
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

# Never a bare name: a package index could return a foreign package of that name.
if [ -z "$source_of" ]; then
    source_of=$(cd "$(dirname "$0")/.." && pwd)
    [ -f "$source_of/deploy/install.sh" ] && [ -f "$source_of/pyproject.toml" ] ||
        fail "this script has no source folder: name a wheel or folder with --from" 2
fi

requirement=$source_of
if [ -n "$extras" ]; then
    requirement="${source_of}[${extras}]"
fi
# A Python managed by uv: updates replace the system's Python, and the firewall identifies programs by their path.
run uv tool install --force --managed-python --python "$python" "$requirement"
run uv tool update-shell

if [ "$dry" = no ]; then
    cat <<'TEXT'

Next, in a new terminal:
  cluster up                           create a pool
  cluster join URL --token-file FILE   or join a pool; `cluster up` prints the line
  cluster doctor                       check this machine for problems
  sudo "$(which cluster)" service install     start macpool with the machine
TEXT
fi
