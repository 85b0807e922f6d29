"""The picture of README.md and of the site: the live page of `diloco demo --quick`, once the killed learner is back.

Down to the merges, as a viewer has it: without the orders.

    .venv/bin/python docs/pictures/live_page.py
    .venv/bin/python docs/pictures/live_page.py --rl

It takes a minute, and a Chromium of the system. It writes live_page.png beside this file, and live_page_dark.png. With
--rl it writes live_page_rl.png: `diloco demo --rl` in the middle, down to the rewards.
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
VICTIM = "learner-2"
MERGES_AFTER = 12  # once it is back, so that the page shows the gap and what follows
MERGES_OF_ROLES = 110
DEADLINE_S = 1200.0
WIDTH = 1120
NUM_COLOURS = 128


def main() -> None:
    """Run the demo, wait for the moment, and take the pictures."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium here; install one, such as the package chromium of Debian.")
    is_rl = "--rl" in sys.argv
    last, schemes = ("#timeline", ("light", "dark")) if not is_rl else ("#rewards", ("light",))
    with (
        tempfile.TemporaryDirectory() as made,
        demo(Path(made, "demo"), *(("--rl", has_learnt) if is_rl else ("--quick", is_back))) as directory,
        sync_playwright() as driver,
    ):
        url = address(directory)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in schemes:
            context = browser.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": 800})
            page = context.new_page()
            page.goto(url)
            page.locator(f"{last} svg").first.wait_for()
            if not is_rl:
                page.locator("#loss svg").first.wait_for()
            page.add_style_tag(content="#steer { display: none }")
            box = page.locator(last).bounding_box()
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"]}
            name = f"live_page{'_rl' * is_rl}{'_dark' * (scheme == 'dark')}.png"
            write(page.screenshot(animations="disabled", full_page=True, clip=clip), HERE / name)
            context.close()
        browser.close()


@contextmanager
def demo(directory: Path, option: str, is_moment: Callable[[Path], bool]) -> Iterator[Path]:
    """The demo's directory, at the moment of its events for the picture."""
    with subprocess.Popen([sys.executable, "-m", "diloco", "demo", option, "--dir", str(directory)]) as running:
        deadline = time.monotonic() + DEADLINE_S
        while not is_moment(directory / "syncer" / "events.jsonl"):
            if running.poll() is not None or time.monotonic() > deadline:
                running.terminate()
                raise SystemExit("the moment for the picture did not come while the demo ran.")
            time.sleep(0.2)
        yield directory
        running.send_signal(signal.SIGINT)


def is_back(events: Path) -> bool:
    """Whether the victim has joined for the second time, and merges have followed."""
    text = events.read_text(encoding="utf-8") if events.exists() else ""
    lines = text.splitlines()
    joined = [n for n, line in enumerate(lines) if '"joined"' in line and f'"{VICTIM}"' in line]
    return len(joined) > 1 and sum('"merged"' in line for line in lines[joined[1] :]) >= MERGES_AFTER


def has_learnt(events: Path) -> bool:
    """Whether so many merges are made, and the killed rollout worker is back long since."""
    return events.exists() and events.read_text(encoding="utf-8").count('"kind":"merged"') >= MERGES_OF_ROLES


def address(directory: Path) -> str:
    """Where the demo's syncer serves its page, as it says."""
    logs = "".join(each.read_text(encoding="utf-8") for each in directory.rglob("syncer*.log"))
    found = re.search(r"watch the run at (http://\S+)", logs)
    if found is None:
        raise SystemExit("the demo's syncer serves no page; pip install 'diloco[demo]'.")
    return found[1]


def write(screenshot: bytes, path: Path) -> None:
    """A screenshot as a small PNG."""
    image = Image.open(BytesIO(screenshot)).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
