#!/bin/sh
# Install Chromium for the test that looks at a server's page, where that is possible; it is skipped without it.
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 && exit 0
fi
echo "chromium is not installed and cannot be installed here: the test of a server's page is skipped"
