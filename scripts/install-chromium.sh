#!/bin/sh
# Install Chromium where the report's browser tests find it, unless there is one (Debian and Ubuntu; needs root or sudo).
set -eu

if command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1; then
    echo "there is a browser already"
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "no apt-get here: install Chromium in your system's own way, or set PFEDGATE_CHROMIUM to a browser's path" >&2
    exit 1
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
    as_root="sudo"
fi
$as_root apt-get update -q
# --no-install-recommends: a test needs neither printing nor sound.
$as_root apt-get install -q -y --no-install-recommends chromium
command -v chromium
