#!/bin/sh
# Removes macpool for this user: the service, then the program. Data stays unless --purge is given and confirmed.
set -eu

usage() {
    cat <<'TEXT'
usage: sh uninstall.sh [--state DIR] [--purge] [--dry-run]

  --state DIR   the state folder, if it is not the default one
  --purge       also remove the state folder: the cluster's identity, keys, videos; asks first
  --dry-run     print the commands without running them
TEXT
}

fail() {
    printf '%s\n' "uninstall.sh: $1" >&2
    exit "${2:-1}"
}

run() {
    if [ "$dry" = yes ]; then
        printf '%s\n' "$*"
    else
        "$@"
    fi
}

purge=no dry=no state=${MACPOOL_STATE:-}
while [ $# -gt 0 ]; do
    case $1 in
        --state) [ $# -ge 2 ] || fail "--state needs a value" 2; state=$2; shift ;;
        --purge) purge=yes ;;
        --dry-run) dry=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option: $1" 2 ;;
    esac
    shift
done

[ "$(id -u)" -ne 0 ] || fail "run it as the user that installed macpool; it asks for sudo if needed" 6
if [ -z "$state" ]; then
    case $(uname -s) in
        Darwin) state="$HOME/Library/Application Support/macpool" ;;
        *) state="${XDG_DATA_HOME:-$HOME/.local/share}/macpool" ;;
    esac
fi
case $state in
    / | "$HOME" | "$HOME/") fail "$state is not a state folder of macpool" 2 ;;
    /*) ;;
    *) fail "--state needs an absolute path" 2 ;;
esac

program=$(command -v cluster || true)
if [ -e /Library/LaunchDaemons/org.macpool.plist ] || [ -e /etc/systemd/system/macpool.service ]; then
    [ -n "$program" ] || fail "a service is installed but the command cluster is missing: install macpool again first" 5
    run sudo "$program" service uninstall
fi
if command -v uv >/dev/null 2>&1 && [ -n "$program" ]; then
    run uv tool uninstall macpool
fi

if [ "$purge" = no ]; then
    printf '%s\n' "kept: $state"
    exit 0
fi
[ -e "$state/cluster.db" ] || [ -d "$state/node" ] || fail "$state holds neither a cluster nor a node: nothing is removed" 5
if [ "$dry" = no ]; then
    printf '%s' "Remove $state, with its keys and videos? This cannot be undone. Type yes: "
    read -r answer || answer=
    [ "$answer" = yes ] || fail "kept: $state"
fi
run rm -rf -- "$state"
