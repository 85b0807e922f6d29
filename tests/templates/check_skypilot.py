"""Let SkyPilot read templates/skypilot: `make sky`, in an environment that holds SkyPilot and not diloco.

What it reads is what `sky launch` and `sky jobs launch` begin with. No cloud is asked.
"""

import os
import tempfile
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"


def main() -> None:
    """Read every task; then see that a task that is wrong is refused."""
    with tempfile.TemporaryDirectory() as made:
        os.environ |= {"HOME": made, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        import sky

        directory = Path(made) / "clone"
        for name in KEYS:
            (directory / "keys" / name).mkdir(parents=True)
        (directory / "run.toml").touch()
        os.chdir(directory)
        syncer = sky.Task.from_yaml(str(TEMPLATES / "skypilot" / "syncer.yaml"))
        (machine,) = syncer.resources
        assert machine.ports == ["7700"]
        assert not machine.use_spot
        for learner in ("site-a", "site-b"):
            task = sky.Task.from_yaml(str(TEMPLATES / "skypilot" / "learner.yaml"))
            task.update_envs({"LEARNER": learner})
            assert all(it.use_spot for it in task.resources)
            assert len({it.region for it in task.resources}) > 1
        refused(directory, "resources: {acelerators: H100}")
        refused(directory, "file_mounts: {/keys: ./nowhere}")
    print("skypilot: reads the syncer and spot learners in several regions, and refuses what is wrong")


KEYS = ("syncer", "site-a", "site-b")


def refused(directory: Path, text: str) -> None:
    """See that SkyPilot does not take a task."""
    import sky

    (directory / "wrong.yaml").write_text(text)
    try:
        sky.Task.from_yaml(str(directory / "wrong.yaml")).validate()
    except ValueError:
        return
    raise SystemExit(f"skypilot: took a task that is wrong: {text}")


if __name__ == "__main__":
    main()
