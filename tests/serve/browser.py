"""A real browser without a window: Debian's Chromium."""

import shutil
import subprocess
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "chromium is not installed (testbed/install_chromium.sh)"


def look(url, folder, *, width=1200, height=900, virtual_seconds=10, dark=False):
    """Open a page, wait, take a picture; returns the page's text as it is then, and the picture's path.

    Chromium has no windows below 500 pixels, so a narrower page is looked at in a frame.
    """
    folder = Path(folder)
    picture = folder / f"page-{width}{'-dark' if dark else ''}.png"
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    common += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},{height}"]
    common += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]  # nothing from the internet
    common += [f"--virtual-time-budget={1000 * virtual_seconds}"]
    if dark:
        common += ["--blink-settings=preferredColorScheme=0"]
    run = {"capture_output": True, "timeout": 120, "check": True}
    with framed(url, folder, width, height) if width < 500 else nullcontext(url) as opened:
        subprocess.run([*common, f"--screenshot={picture}", opened], **run)
    dom = subprocess.run([*common, "--dump-dom", url], **run).stdout.decode()
    return dom, picture


@contextmanager
def framed(url, folder, width, height):
    """A page with a frame of that size; from the same host, or virtual time would not wait for the frame."""
    size = f"border:0;width:{width}px;height:{height}px"
    (folder / "frame.html").write_text(f'<body style="margin:0"><iframe src="{url}" style="{size}"></iframe>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/frame.html"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass
