#!/bin/sh -eu
# Serve on a RunPod pod with a volume: install once, download the model once, then serve.
# Everything is kept under WORKSPACE, so a restarted pod serves again without a download.
#
#   SHOAL_MODEL      nano, s1-mini, s2-pro, OWNER/NAME or a directory
#   SHOAL_PORT       the port that the pod exposes
#   SHOAL_PACKAGE    what pip installs: a requirement, a wheel, or an address: https://….whl, git+https://….git
#                    default: the wheel shoal_tts-*.whl beside this script, else the version that the script belongs to
#   HF_TOKEN         for gated models
VERSION=0.1.0
WORKSPACE=${WORKSPACE:-/workspace}/shoal
VENV=$WORKSPACE/venv

export XDG_CONFIG_HOME="$WORKSPACE/config" XDG_DATA_HOME="$WORKSPACE/data" XDG_STATE_HOME="$WORKSPACE/state"
export XDG_CACHE_HOME="$WORKSPACE/cache" HF_HOME="$WORKSPACE/models"
export SHOAL_MODEL="${SHOAL_MODEL:-nano}" SHOAL_PORT="${SHOAL_PORT:-8080}" SHOAL_HOST="${SHOAL_HOST:-0.0.0.0}"

mkdir -p "$WORKSPACE"
if ! [ -x "$VENV/bin/shoal" ]; then
    # RunPod images include a torch that fits their driver: use it.
    python3 -m venv --system-site-packages "$VENV"
    for wheel in "$(dirname "$0")"/shoal_tts-*.whl; do
        if [ -e "$wheel" ]; then : "${SHOAL_PACKAGE:=$wheel}"; fi
    done
    case ${SHOAL_PACKAGE:=shoal-tts==$VERSION} in
        *://*) wanted="shoal-tts[server] @ $SHOAL_PACKAGE" ;;  # pip reads no extras at the end of an address
        *==*) wanted="${SHOAL_PACKAGE%%==*}[server]==${SHOAL_PACKAGE#*==}" ;;
        *) wanted="${SHOAL_PACKAGE}[server]" ;;
    esac
    "$VENV/bin/pip" install --quiet "$wanted"
fi

case $SHOAL_MODEL in
    nano | random:* | /* | ./* | ../*) ;;
    *) [ -d "$SHOAL_MODEL" ] || "$VENV/bin/shoal" pull "$SHOAL_MODEL" ;;
esac

# The first start creates an API key and prints it once; `shoal keys` makes further ones.
if ! [ -e "$XDG_CONFIG_HOME/shoal/keys.json" ] && [ -z "${SHOAL_API_KEYS:-}" ]; then
    echo "the key of this pod: $("$VENV/bin/shoal" keys new pod)"
fi

exec "$VENV/bin/shoal" serve
