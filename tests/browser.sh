# The page tests need a Chromium. Use the one that is there; on Debian and as root, install it.
set -eu
for browser in "${NORMALCY_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$browser" ] && command -v "$browser" >/dev/null; then
        exit 0
    fi
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
    exit 0
fi
echo "The page tests need Chromium: install it (Debian: apt-get install chromium), or set NORMALCY_CHROMIUM" \
    "to a Chromium or Chrome. Without it those tests fail." >&2
