"""The picture of README.md and of the site: the page of `diloco demo --quick`, which has the kill and the controls.

    .venv/bin/python docs/pictures/live_page.py
    .venv/bin/python docs/pictures/live_page.py --rl
    .venv/bin/python docs/pictures/live_page.py runs/demo     # the page of a demo that has run

It takes the time of the demo, and a Chromium of the system. It writes live_page.png beside this file, and of the same
page live_page_dark.png. With --rl it writes live_page_rl.png: the page of `diloco demo --rl`, down to the rewards.
"""

import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH = 1120
NUM_COLOURS = 255


def main() -> None:
    """Run the demo, and take the pictures of its page."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium on this machine; install one, such as the package chromium of Debian.")
    is_rl, made = "--rl" in sys.argv, [each for each in sys.argv[1:] if each != "--rl"]
    last, schemes = ("#times", ("light", "dark")) if not is_rl else ("#rewards", ("light",))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        directory = Path(made[0] if made else temporary).resolve()
        if not made:
            demo = [sys.executable, "-m", "diloco", "demo", "--rl" if is_rl else "--quick", "--no-open"]
            subprocess.run([*demo, "--dir", str(directory / "demo")], check=True)
            directory /= "demo"
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in schemes:
            page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": 800})
            page.goto((directory / "report.html").as_uri())
            page.locator(f"{last} {'svg' if is_rl else 'span'}").last.wait_for()
            box = page.locator(last).bounding_box()
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 12}
            name = f"live_page{'_rl' * is_rl}{'_dark' * (scheme == 'dark')}.png"
            write(page.screenshot(animations="disabled", full_page=True, clip=clip), HERE / name)
        browser.close()


def write(screenshot: bytes, path: Path) -> None:
    """A screenshot as a small PNG."""
    image = Image.open(BytesIO(screenshot)).convert("RGB")
    image = image.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
